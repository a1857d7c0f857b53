"""Changes to named files for a restore, each of which can be taken back: by us, or by whoever finds our journal.

put       a file that is missing is made under a name of ours, synced, and renamed; one that was a further name of
          another file becomes a hard link to that again
replace   the file that is there is renamed to NAME.before-restore-ID, then as above
cut       the end of the file is saved as NAME.later-ID, then the file itself is made shorter: whoever has it open
          (a logger) keeps the same file

Each act stands in the journal before it begins, so that a kill at any point leaves nothing that `undo` does
not know. The journal lies in /run: after a reboot in the middle nothing is lost either, for what was there
lies beside. No link is followed, not even on the way to the file: its directory may be another user's.

Days may pass between a kill and the undo. A file that was written to since, or that somebody has open for
writing, stays as it is then, and what was there before stays beside it.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from gpuckpt.model.records import dataclass
from gpuckpt.system import leases
from gpuckpt.system.copying import copy_range, copy_whole, same_bytes
from gpuckpt.system.files import directory_of, open_plain, opened_in, rename_to_new

JOURNAL = "file-changes"
"""The journal's name in the directory of its run."""

CHANGED = "it has changed since it was looked at"


@dataclass(frozen=True, slots=True)
class Attributes:
    """What a file that is put in place gets beside its content."""

    mode: int
    uid: int
    gid: int
    mtime_ns: int


@dataclass(frozen=True, slots=True)
class Judged:
    """A file as it was when it was decided to change it: another one is never touched."""

    device: int
    inode: int
    size: int

    def require(self, seen: os.stat_result, path: str) -> None:
        """Raises OSError where this is another file, or of another size."""
        if (seen.st_dev, seen.st_ino, seen.st_size) != (self.device, self.inode, self.size):
            raise OSError(errno.ESTALE, CHANGED, path)


@dataclass(frozen=True, slots=True)
class Name:
    """A file that shall get a further name."""

    path: str
    device: int
    inode: int


class FileChanges:
    """The changes of one run. Whatever raises, `undo` takes back all that was done; `keep` makes it stay."""

    def __init__(self, run_directory: Path, run_id: str, going_on: Callable[[], None]) -> None:
        self._journal = run_directory / JOURNAL
        self._id = run_id
        self._going_on = going_on
        self._count = 0
        self.made: dict[str, tuple[int, int]] = {}
        """Path -> (device, inode) of the files that were put in place."""

    def put(self, path: str, source: Path | Name, attributes: Attributes) -> None:
        """Make the missing file `path` with the content of `source`, or as a hard link to it.

        Raises OSError, and what `going_on` raises.
        """
        with directory_of(path) as (directory, name):
            temporary, made = self._make(directory, path, source, attributes)
            self._write("put", path, made=_identity(made), linked=isinstance(source, Name))
            rename_to_new(temporary, name, directory)
            os.fsync(directory)
            self.made[path] = (made.st_dev, made.st_ino)

    def replace(self, path: str, source: Path | Name, attributes: Attributes, judged: Judged) -> str:
        """Move the file `path` aside and put another in its place; returns where the old one lies. Raises as `put`."""
        with directory_of(path) as (directory, name):
            judged.require(_look(directory, name, path), path)
            aside = _fitting(directory, f"{name}.before-restore-{self._id}", path)
            temporary, made = self._make(directory, path, source, attributes)
            self._write("replace", path, aside=aside, made=_identity(made), linked=isinstance(source, Name))
            rename_to_new(name, aside, directory)
            judged.require(_look(directory, aside, path), path)  # exchanged just now? Then `undo` gives it its name
            rename_to_new(temporary, name, directory)
            os.fsync(directory)
            self.made[path] = (made.st_dev, made.st_ino)
            return _beside(path, aside)

    def cut(self, path: str, size: int, mtime_ns: int, judged: Judged) -> str:
        """Save what lies behind `size` and cut it off; returns where it lies.

        Raises as `put`; OSError (EBUSY) where somebody has the file open: what he writes meanwhile would be lost.
        """
        with (
            directory_of(path) as (directory, name),
            opened_in(directory, name, path, os.O_RDWR) as file,
            leases.alone_with(file, path) as require_alone,
        ):
            seen = os.fstat(file)
            judged.require(seen, path)
            later = _fitting(directory, f"{name}.later-{self._id}", path)
            # Under its name from the beginning, for it is worth nothing until it is whole: then `cut` is written.
            self._write("make", path, name=later)
            with _created(directory, later, path) as tail:
                copy_range(file, tail, size, seen.st_size, going_on=self._going_on)
                _set(tail, Attributes(stat.S_IMODE(seen.st_mode), seen.st_uid, seen.st_gid, seen.st_mtime_ns))
                os.fsync(tail)
            os.fsync(directory)
            require_alone()  # from here on the kernel keeps others waiting for longer than this takes
            judged.require(os.fstat(file), path)
            whole = {"size": size, "whole": seen.st_size, "mtime_ns": seen.st_mtime_ns}
            self._write("cut", path, later=later, old=[judged.device, judged.inode], **whole)
            os.ftruncate(file, size)
            os.utime(file, ns=(seen.st_atime_ns, mtime_ns))
            os.fsync(file)
            return _beside(path, later)

    def undo(self) -> list[str]:
        """Take everything back, the last change first; returns what could not be, in words."""
        return undo(self._journal.parent)

    def keep(self) -> None:
        """It is as it must be: nobody takes it back from here on."""
        self._journal.unlink(missing_ok=True)

    def _make(
        self, directory: int, path: str, source: Path | Name, attributes: Attributes
    ) -> tuple[str, os.stat_result]:
        """A whole, synced file in the directory, under a name of ours."""
        self._count += 1
        temporary = f".gpuckpt-{self._id}-{self._count}"
        self._write("make", path, name=temporary)
        if isinstance(source, Name):
            return temporary, _link(source, directory, temporary)
        content = open_plain(source)
        try:
            with _created(directory, temporary, path) as file:
                copy_whole(content, file, self._going_on)
                _set(file, attributes)
                os.fsync(file)
                return temporary, os.fstat(file)
        finally:
            os.close(content)

    def _write(self, act: str, path: str, **facts: Any) -> None:
        """Note that an act is about to begin; without that it does not. Raises OSError."""
        line = json.dumps({"act": act, "path": path, **facts}).encode() + b"\n"
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        journal = os.open(self._journal, flags, 0o600)
        with os.fdopen(journal, "wb", buffering=0) as out:
            if out.write(line) != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._journal))


def _link(source: Name, directory: int, name: str) -> os.stat_result:
    """Give a file a further name. Raises OSError, also where another one stands under its own by now."""
    try:
        with directory_of(source.path) as (there, old):
            os.link(old, name, src_dir_fd=there, dst_dir_fd=directory, follow_symlinks=False)
    except OSError as error:
        raise OSError(error.errno, f"it cannot be a hard link to {source.path} again: {error.strerror}") from None
    made = os.stat(name, dir_fd=directory, follow_symlinks=False)
    if not stat.S_ISREG(made.st_mode) or (made.st_dev, made.st_ino) != (source.device, source.inode):
        raise OSError(errno.ESTALE, CHANGED, source.path)
    return made


def _fitting(directory: int, name: str, path: str) -> str:
    """A name that the file system takes; raises OSError before anything is done under another."""
    if len(os.fsencode(name)) > os.fpathconf(directory, "PC_NAME_MAX"):
        raise OSError(errno.ENAMETOOLONG, f"no file beside it can be called {name}", path)
    return name


def _beside(path: str, name: str) -> str:
    return str(PurePosixPath(path).with_name(name))


def _look(directory: int, name: str, path: str) -> os.stat_result:
    """A regular file under a name. Raises OSError for anything else."""
    seen = os.stat(name, dir_fd=directory, follow_symlinks=False)
    if not stat.S_ISREG(seen.st_mode):
        raise OSError(errno.EINVAL, "it is no regular file", path)
    return seen


@contextlib.contextmanager
def _created(directory: int, name: str, path: str) -> Iterator[int]:
    """A new file; an error that knows no name gets this one."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        descriptor = os.open(name, flags, 0o600, dir_fd=directory)
        try:
            yield descriptor
        finally:
            os.close(descriptor)
    except OSError as error:
        if error.filename in (None, name):
            raise OSError(error.errno, error.strerror, _beside(path, name)) from None
        raise


def _set(file: int, attributes: Attributes) -> None:
    # The owner first: a change of the owner takes bits off the mode.
    os.fchown(file, attributes.uid, attributes.gid)
    os.fchmod(file, attributes.mode)
    os.utime(file, ns=(attributes.mtime_ns, attributes.mtime_ns))


def undo(run_directory: Path) -> list[str]:
    """Take back what the journal of a run says; returns what could not be, in words.

    May be repeated, and cut off at any point. When it is through the journal goes, also where something could not be
    taken back: what was there lies beside, and a later try could find somebody's new file under the old name.
    """
    journal = run_directory / JOURNAL
    problems = []
    lines = _lines(journal)
    ends = {_beside(line["path"], line["later"]) for line in lines if line["act"] == "cut"}
    for line in reversed(lines):
        if line["act"] == "make" and _beside(line["path"], line["name"]) in ends:
            continue  # it holds what was cut off: gone with the cut taken back, and not before
        try:
            _take_back(line)
        except OSError as error:
            problems.append(f"{line['path']} is not as before: {error.strerror}{_kept(line)}")
    with contextlib.suppress(OSError):
        journal.unlink()
    return list(dict.fromkeys(problems))


def _take_back(line: dict[str, Any]) -> None:
    """What is missing in its directory was never done, or taken back already. A missing directory tells nothing."""
    with directory_of(line["path"]) as (directory, name), contextlib.suppress(FileNotFoundError):
        _UNDO[line["act"]](line, directory, name)


def _kept(line: dict[str, Any]) -> str:
    if line["act"] == "replace":
        return f"; the one from before is {_beside(line['path'], line['aside'])}"
    return f"; the end that was cut off is in {_beside(line['path'], line['later'])}" if line["act"] == "cut" else ""


def _lines(journal: Path) -> list[dict[str, Any]]:
    """What a crash cut short was not yet begun."""
    try:
        texts = journal.read_bytes().split(b"\n")
    except OSError:
        return []
    lines = []
    for text in texts:
        with contextlib.suppress(ValueError):
            lines.append(json.loads(text))
    return [line for line in lines if _is_whole(line)]


_FACTS = {
    "make": {"name"},
    "put": {"made"},
    "replace": {"aside", "made"},
    "cut": {"later", "old", "size", "whole", "mtime_ns"},
}
"""What a line says beside its act and path."""


def _is_whole(line: object) -> bool:
    if not isinstance(line, dict) or not str(line.get("path")).startswith("/"):
        return False
    return line.get("act") in _FACTS and line.keys() >= _FACTS[line["act"]]


def _undo_make(line: dict[str, Any], directory: int, _name: str) -> None:
    os.unlink(line["name"], dir_fd=directory)


def _undo_put(line: dict[str, Any], directory: int, name: str) -> None:
    if _is(directory, name, line["made"]):
        with _untouched(line, directory, name):
            os.unlink(name, dir_fd=directory)


def _undo_replace(line: dict[str, Any], directory: int, name: str) -> None:
    aside = line["aside"]
    os.stat(aside, dir_fd=directory, follow_symlinks=False)  # FileNotFoundError: never moved, or back already
    if _is(directory, name, line["made"]):
        with _untouched(line, directory, name):
            os.rename(aside, name, src_dir_fd=directory, dst_dir_fd=directory)
    else:
        _rename_back(directory, aside, name)
    os.fsync(directory)


def _rename_back(directory: int, aside: str, name: str) -> None:
    try:
        rename_to_new(aside, name, directory)
    except FileExistsError:
        raise OSError(errno.EEXIST, "another file stands there now") from None


@contextlib.contextmanager
def _untouched(line: dict[str, Any], directory: int, name: str) -> Iterator[None]:
    """The file that we made is as we made it, and nobody writes to it. Raises OSError.

    A further name of a file is no file: it may go as long as that has another, whatever was written to it.
    """
    if line.get("linked"):
        if os.stat(name, dir_fd=directory, follow_symlinks=False).st_nlink < 2:  # this one and another
            raise OSError(errno.ESTALE, "its other names are gone, and it stays")
        yield
        return
    with opened_in(directory, name, line["path"], os.O_RDONLY) as file, leases.alone_with(file, line["path"]):
        if _identity(os.fstat(file)) != line["made"]:
            raise OSError(errno.ESTALE, "what was put there has been written to since, and stays")
        yield


def _undo_cut(line: dict[str, Any], directory: int, name: str) -> None:
    with opened_in(directory, line["later"], line["path"], os.O_RDONLY) as tail:
        try:
            _put_end_back(line, directory, name, tail)
        except FileNotFoundError:
            raise OSError(errno.ESTALE, "it is gone") from None
    os.unlink(line["later"], dir_fd=directory)


def _put_end_back(line: dict[str, Any], directory: int, name: str, tail: int) -> None:
    """Put the end back behind the rest: bytes that are back already must be the same."""
    path, size = line["path"], line["size"]
    with opened_in(directory, name, path, os.O_RDWR) as file, leases.alone_with(file, path):
        seen = os.fstat(file)
        there = seen.st_size - size
        if [seen.st_dev, seen.st_ino] != line["old"] or not (
            0 <= there <= line["whole"] - size and same_bytes(tail, file, there, at=size)
        ):
            raise OSError(errno.EEXIST, "it has changed")
        copy_range(tail, file, there, line["whole"] - size, at=seen.st_size)
        os.utime(file, ns=(seen.st_atime_ns, line["mtime_ns"]))
        os.fsync(file)


_UNDO: dict[str, Callable[[dict[str, Any], int, str], None]] = {
    "make": _undo_make,
    "put": _undo_put,
    "replace": _undo_replace,
    "cut": _undo_cut,
}


def _identity(seen: os.stat_result) -> list[int]:
    """Of a file that we made: which it is, and whether somebody has written to it since."""
    return [seen.st_dev, seen.st_ino, seen.st_size, seen.st_mtime_ns]


def _is(directory: int, name: str, identity: list[int]) -> bool:
    try:
        seen = os.stat(name, dir_fd=directory, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return [seen.st_dev, seen.st_ino] == identity[:2]

"""Directories and links that a job needs on the host it moves to: made before its copy comes up, taken back if not.

What is made stands in a record beside the images on their way, before it is made, and locked as long as its maker
lives: a record that nobody holds is of one that was killed, and what it made and is still empty goes (`tidy`).
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from gpuckpt.model.migration import INCOMING_PLACE
from gpuckpt.system.files import directory_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gpuckpt.model.migration import Directory, Link, Terms

SUFFIX = ".made"
MOST_BYTES = 64 << 20


@dataclass(slots=True)
class Ground:
    """What one copy needs. `keep` or `take_back` in the end."""

    directories: list[Directory] = field(default_factory=list)
    """Made here, outer ones first."""
    links: list[Link] = field(default_factory=list)
    """Made here."""
    notes: list[str] = field(default_factory=list)
    record: Path | None = None
    _lock: int = -1

    def make(self, terms: Terms) -> None:
        """Make those that are missing, with their mode, owner and times. Raises OSError; then take it back.

        A directory that is new is made before anything that lies in it, and no link is followed on the way to a link.
        """
        directories = [one for one in sorted(terms.directories, key=_path) if not os.path.lexists(one.path)]
        links = [one for one in sorted(terms.links, key=_path) if self._is_missing(one)]
        if not directories and not links:
            return
        self._write_down(terms, [one.path for one in directories], [(one.path, one.target) for one in links])
        for directory in directories:
            os.mkdir(directory.path, 0o700)  # noqa: PTH102 - a path as text
            self.directories.append(directory)
            os.chown(directory.path, directory.uid, directory.gid, follow_symlinks=False)
            os.chmod(directory.path, directory.mode)  # noqa: PTH101 - just made
        for link in links:
            with directory_of(link.path) as (parent, name):
                os.symlink(link.target, name, dir_fd=parent)
                self.links.append(link)
                os.chown(name, link.uid, link.gid, dir_fd=parent, follow_symlinks=False)
                os.utime(name, ns=(link.mtime_ns, link.mtime_ns), dir_fd=parent, follow_symlinks=False)

    def _is_missing(self, link: Link) -> bool:
        if not os.path.lexists(link.path):
            return True
        if _target(link.path) != link.target:
            self.notes.append(f"{link.path} stays as it is here: where the job ran it is a link to {link.target}")
        return False

    def _write_down(self, terms: Terms, directories: list[str], links: list[tuple[str, str]]) -> None:
        Path(INCOMING_PLACE).mkdir(mode=0o700, parents=True, exist_ok=True)
        record = Path(INCOMING_PLACE) / f"{terms.transaction}{SUFFIX}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        while True:
            self._lock = os.open(record, flags, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            if _still_stands(record, self._lock):
                break
            os.close(self._lock)  # somebody tidied between the two steps
        self.record = record
        said = json.dumps({"directories": directories, "links": links}).encode("ascii")
        while said:
            said = said[os.write(self._lock, said) :]
        os.fsync(self._lock)

    def set_times(self) -> None:
        """All files are in their places, and the copy does not run yet: directories get the times they had."""
        for directory in reversed(self.directories):
            with contextlib.suppress(OSError):
                os.utime(directory.path, ns=(directory.mtime_ns, directory.mtime_ns), follow_symlinks=False)

    def keep(self) -> None:
        """The copy runs."""
        self._forget()

    def take_back(self) -> None:
        """It does not, and never will."""
        _remove([one.path for one in self.directories], [(one.path, one.target) for one in self.links])
        self._forget()

    def _forget(self) -> None:
        if self.record is not None:
            with contextlib.suppress(OSError):  # the copy may run by now: what else fails must not be its failure
                self.record.unlink()
            os.close(self._lock)
            self.record = None


def _path(one: Directory | Link) -> str:
    return one.path


def _target(path: str) -> str | None:
    try:
        return os.readlink(path)  # noqa: PTH115 - a target as it is
    except OSError:
        return None


def _remove(directories: Sequence[str], links: Sequence[tuple[str, str]]) -> None:
    """Links that lead where they were made to lead, and directories that are empty."""
    for path, target in links:
        with contextlib.suppress(OSError), directory_of(path) as (parent, name):
            if os.readlink(name, dir_fd=parent) == target:
                os.unlink(name, dir_fd=parent)
    for path in reversed(directories):
        with contextlib.suppress(OSError):
            os.rmdir(path)  # noqa: PTH106 - a path as text


def tidy() -> None:
    """Take back what killed ones have made. Raises nothing: it can be done another time.

    Files that were put into such directories must be gone by then: `runs.begin` sees to that.
    """
    with contextlib.suppress(OSError):
        for record in Path(INCOMING_PLACE).glob(f"*{SUFFIX}"):
            with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
                _tidy(record)


def _still_stands(record: Path, lock: int) -> bool:
    """Whether what is locked is still what stands under its name."""
    try:
        return os.path.samestat(os.fstat(lock), record.lstat())
    except FileNotFoundError:
        return False


def _tidy(record: Path) -> None:
    lock = os.open(record, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not _still_stands(record, lock):
            return  # its maker has just ended, and what it made is in use
        with os.fdopen(os.dup(lock), "rb") as file:
            raw = file.read(MOST_BYTES)
        if raw:  # else it was killed before it made anything
            said = json.loads(raw)
            _remove(said["directories"], said["links"])
        record.unlink()
    finally:
        os.close(lock)

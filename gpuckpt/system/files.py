"""What the standard library lacks for files that others may exchange under our hands."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from gpuckpt.model.records import dataclass

_libc = ctypes.CDLL(None, use_errno=True)

AT_FDCWD = -100
RENAME_NOREPLACE = 1
UNSUPPORTED = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)
STATFS_BYTES = 512
"""More than struct statfs has anywhere; its first field is f_type."""

IN_MEMORY = (0x01021994, 0x858458F6)
"""f_type of tmpfs and ramfs (linux/magic.h)."""

MOST_LINKS = 40
"""The kernel's own limit for one path."""


def user_of_files() -> int:
    """As whom this process makes and opens files: its effective user, and root where it is confined (setfsuid(2))."""
    found: int = _libc.setfsuid(-1)
    return found


@dataclass(frozen=True, slots=True)
class Placed:
    """A file under a name, known well enough never to remove another one that stands there later."""

    path: str
    device: int
    inode: int

    @property
    def still_there(self) -> bool:
        """The name leads to this very file."""
        return placed(self.path) == self

    def remove(self) -> None:
        """Remove the name, where it still leads to this file."""
        with contextlib.suppress(OSError):
            if self.still_there:
                os.unlink(self.path)  # noqa: PTH108 - a path as text

    def to_json(self) -> list[Any]:
        """For messages and the journal; `placed_from` reads it."""
        return [self.path, self.device, self.inode]


def placed(path: str | os.PathLike[str]) -> Placed | None:
    """What stands under a name now (a link itself, not what it leads to); None where nothing does."""
    try:
        seen = os.lstat(path)
    except OSError:
        return None
    return Placed(os.fspath(path), seen.st_dev, seen.st_ino)


def placed_from(entries: Any) -> tuple[Placed, ...]:
    """Read what `to_json` wrote; what is anything else is left out."""
    found = (tuple(entry) for entry in entries if isinstance(entry, list)) if isinstance(entries, list) else ()
    return tuple(
        Placed(*entry)
        for entry in found
        if len(entry) == 3 and isinstance(entry[0], str) and all(isinstance(number, int) for number in entry[1:])
    )


def open_plain(path: str | os.PathLike[str]) -> int:
    """A regular file, opened for reading: no link is followed, no FIFO waited for. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(0, "it is no regular file", os.fspath(path))
    return descriptor


@contextlib.contextmanager
def directory_of(path: str) -> Iterator[tuple[int, str]]:
    """The directory of an absolute path, open, and the name in it. Raises OSError, also for a link on the way."""
    *steps, name = PurePosixPath(path).parts[1:]
    at = os.open("/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for step in steps:
            below = os.open(step, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=at)
            os.close(at)
            at = below
        # Not only a place (O_PATH): it must be synced.
        directory = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=at)
    except OSError as error:
        why = "a link on the way is not followed" if error.errno in (errno.ELOOP, errno.ENOTDIR) else error.strerror
        raise OSError(error.errno, why, path) from None
    finally:
        os.close(at)
    try:
        yield directory, name
    finally:
        os.close(directory)


@contextlib.contextmanager
def opened_in(directory: int, name: str, path: str, flags: int) -> Iterator[int]:
    """A regular file of an open directory; `path` is for the words. No link is followed. Raises OSError."""
    descriptor = os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=directory)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "it is no regular file", path)
        yield descriptor
    finally:
        os.close(descriptor)


def rename_to_new(source: str | Path, target: str | Path, directory_fd: int | None = None) -> None:
    """Rename; raises FileExistsError where anything, an empty directory included, stands at `target`. Raises OSError.

    With `directory_fd` both are names in that directory. Some file systems (NFS) and old C libraries cannot do it in
    one step: there it is looked at first.
    """
    number = _rename_no_replace(source, target, AT_FDCWD if directory_fd is None else directory_fd)
    if number in UNSUPPORTED:
        if _stands_there(target, directory_fd):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target))
        os.rename(source, target, src_dir_fd=directory_fd, dst_dir_fd=directory_fd)
    elif number:
        raise OSError(number, os.strerror(number), str(source), None, str(target))


def _stands_there(name: str | Path, directory_fd: int | None) -> bool:
    try:
        os.stat(name, dir_fd=directory_fd, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


def _rename_no_replace(source: str | Path, target: str | Path, directory_fd: int) -> int:
    """0 or the error's number."""
    call = getattr(_libc, "renameat2", None)
    if call is None:
        return errno.ENOSYS
    flags = ctypes.c_uint(RENAME_NOREPLACE)
    done = call(directory_fd, os.fsencode(source), directory_fd, os.fsencode(target), flags)
    return 0 if done == 0 else ctypes.get_errno()


def replace_file(path: Path, change: Callable[[bytes], bytes], mode: int, most_bytes: int = 1 << 20) -> None:
    """Replace a file in one step by what `change` makes of its content (nothing, where there is none). Raises OSError.

    Readers see the old file or the new one, also after a crash. The file beside it, under which it is written, is a
    new one: where others can write to the directory, they could have put a link there.
    """
    new = path.with_name(f".{path.name}.{os.getpid()}.new")
    content = change(_content(path, most_bytes))
    with contextlib.suppress(FileNotFoundError):
        new.unlink()
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fchmod(descriptor, mode)
            os.fsync(descriptor)
        new.replace(path)
    except OSError:
        new.unlink(missing_ok=True)
        raise


def _content(path: Path, most_bytes: int) -> bytes:
    try:
        descriptor = open_plain(path)
    except FileNotFoundError:
        return b""
    with os.fdopen(descriptor, "rb") as file:
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise OSError(errno.EFBIG, "it is larger than it can be", str(path))
    return content


def is_in_memory(path: Path) -> bool:
    """Whether what is written there stays in memory (and swap): tmpfs or ramfs. False where it cannot be told."""
    seen = ctypes.create_string_buffer(STATFS_BYTES)
    if _libc.statfs(os.fsencode(path), seen) != 0:
        return False
    return ctypes.c_long.from_buffer(seen).value & 0xFFFFFFFF in IN_MEMORY


def unsafe_places(path: Path, own_uid: int) -> tuple[str, ...]:
    """Who else than root and `own_uid` can exchange what `path` leads to, itself included: '/srv/x belongs to user 7'.

    Every directory and every link on the way is judged. In a directory with the sticky bit (as /tmp) others
    can add names, not rename or remove ours.
    """
    at, pending, links = Path("/"), [*reversed(path.absolute().parts[1:])], 0
    found = _exchangeable(at, own_uid)
    while pending and links < MOST_LINKS:
        name = pending.pop()
        step = at.parent if name == ".." else at / name
        try:
            to = str(step.readlink()) if step.is_symlink() else None
            found += [words for words in _exchangeable(step, own_uid) if words not in found]
        except OSError:
            break  # what is not there cannot be exchanged
        if to is None:
            at = step
            continue
        links += 1
        at = Path("/") if to.startswith("/") else at
        pending += [part for part in reversed(Path(to).parts) if part != "/"]
    return tuple(found)


def _exchangeable(place: Path, own_uid: int) -> list[str]:
    seen = place.lstat()
    found = []
    if seen.st_uid not in (0, own_uid):
        found.append(f"{place} belongs to user {seen.st_uid}")
    writable = seen.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not stat.S_ISLNK(seen.st_mode)
    if writable and not (stat.S_ISDIR(seen.st_mode) and seen.st_mode & stat.S_ISVTX):
        found.append(f"{place} has mode {stat.S_IMODE(seen.st_mode):04o}")
    return found

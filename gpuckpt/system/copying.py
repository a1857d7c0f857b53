"""Copying and comparing the content of files: blocks are shared where the file system can, holes stay holes.

All of these take open descriptors, need little memory whatever the size, and call `going_on` between
pieces: it may raise, and what was written until then is the caller's to remove.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable, Iterator

FICLONE = 0x40049409
"""ioctl of linux/fs.h: the target shares all blocks of the source (btrfs, XFS)."""

STEP_BYTES = 16 << 20
BUFFER_BYTES = 1 << 20
NOT_POSSIBLE = (errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM)
"""copy_file_range(2): other file systems, file systems without it, old kernels; then bytes are read and written."""


def _nothing() -> None:
    return


def copy_whole(source: int, target: int, going_on: Callable[[], None] = _nothing) -> None:
    """Give the empty file `target` the content and size of `source`. Raises OSError."""
    try:
        fcntl.ioctl(target, FICLONE, source)
    except OSError:
        copy_range(source, target, 0, os.fstat(source).st_size, going_on=going_on)


def copy_range(
    source: int, target: int, begin: int, end: int, *, at: int = 0, going_on: Callable[[], None] = _nothing
) -> None:
    """Copy the bytes from `begin` to `end` of `source` to the offset `at` of `target`, which has none there yet.

    `target` has at least `at + end - begin` bytes afterwards. Raises OSError.
    """
    for start, stop in _data(source, begin, end):
        offset = start
        while offset < stop:
            going_on()
            offset += _copy_piece(source, target, offset, at + offset - begin, min(stop - offset, STEP_BYTES))
    if os.fstat(target).st_size < at + end - begin:
        os.ftruncate(target, at + end - begin)


def _data(source: int, begin: int, end: int) -> Iterator[tuple[int, int]]:
    """Where a file has data between two offsets; all of it where the file system does not tell."""
    offset = begin
    while offset < end:
        try:
            start = os.lseek(source, offset, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:  # a hole up to the end
                return
            yield offset, end
            return
        stop = min(os.lseek(source, start, os.SEEK_HOLE), end)
        if start >= end:
            return
        yield start, stop
        offset = stop


def _copy_piece(source: int, target: int, offset: int, to: int, count: int) -> int:
    """Copy up to `count` bytes; returns how many. Raises OSError, also where the source has become shorter."""
    try:
        copied = os.copy_file_range(source, target, count, offset, to)
    except OSError as error:
        if error.errno not in NOT_POSSIBLE:
            raise
        copied = 0
    if copied:
        return copied
    piece = os.pread(source, min(count, BUFFER_BYTES), offset)
    if not piece:
        raise OSError(errno.EIO, "it has become shorter while it was copied")
    return os.pwrite(target, piece, to)


def same_bytes(one: int, other: int, count: int, *, at: int = 0, going_on: Callable[[], None] = _nothing) -> bool:
    """Whether `count` bytes from the start of `one` are those from `at` on of `other`. Raises OSError."""
    offset = 0
    while offset < count:
        going_on()
        size = min(BUFFER_BYTES, count - offset)
        ours, theirs = os.pread(one, size, offset), os.pread(other, size, at + offset)
        shorter = min(len(ours), len(theirs))
        if not shorter or ours[:shorter] != theirs[:shorter]:
            return False
        offset += shorter
    return True

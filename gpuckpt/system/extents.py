"""Bytes of an open file on their way into a stream, handed over by the kernel: no copy of them in this process."""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING

from gpuckpt.model.records import dataclass

if TYPE_CHECKING:
    from collections.abc import Callable

CANNOT = (errno.EINVAL, errno.ENOSYS, errno.EPERM)
"""Of a file system, or a kernel, that hands no pages over."""


@dataclass(frozen=True, slots=True)
class Extent:
    """Where the bytes lie. They must not change as long as they are under way."""

    descriptor: int
    offset: int
    size: int

    def __len__(self) -> int:
        """Its size in bytes."""
        return self.size

    def __getitem__(self, part: slice) -> Extent:
        """A part of it, as of bytes."""
        start, stop, _ = part.indices(self.size)
        return Extent(self.descriptor, self.offset + start, max(0, stop - start))


def pass_on(
    extent: Extent, most: int, hand_over: Callable[[int, int, int], int], send: Callable[[memoryview], int]
) -> None:
    """`hand_over` at most `most` bytes (descriptor, offset, count) at once; read and `send` them where it cannot.

    Both say how many bytes they took. Raises OSError, also where the file has become shorter.
    """
    at, end = extent.offset, extent.offset + extent.size
    while at < end:
        count = min(most, end - at)
        try:
            sent = hand_over(extent.descriptor, at, count)
        except OSError as error:
            if error.errno not in CANNOT:
                raise
            content = os.pread(extent.descriptor, count, at)
            sent = send(memoryview(content)) if content else 0
        if sent == 0:
            raise OSError(errno.EIO, "the file has become shorter while it was sent")
        at += sent

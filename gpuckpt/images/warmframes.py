"""Frames of an older image, unpacked and verified ahead of the restore that will want most of them again.

A migration with --pre-seed has the older image there while the job still runs: what unpacking and hashing it takes is
no downtime then. A frame is the same where the digest and the length of its raw bytes are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from gpuckpt.images.framesource import FrameSource, carry_out
from gpuckpt.images.packindex import ZERO, read_index
from gpuckpt.images.packs import PackReader

if TYPE_CHECKING:
    import mmap
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from gpuckpt.images.packindex import Frame, Index

Work = TypeVar("Work")
Warm = dict[tuple[bytes, int], bytes]
"""(digest, length) of raw bytes -> the bytes."""


def warm(packs: Path, most_bytes: int, going_on: Callable[[], None]) -> Warm:
    """The frames of the packs in a directory, up to so many bytes of them together.

    Raises ImageCorrupt, ImageTooNew, and what `going_on` raises.
    """
    index = read_index(packs / "index")
    found: Warm = {}
    if _is_keyed(index):
        return found
    wanted: dict[tuple[bytes, int], Frame] = {}
    size = 0
    for frame in (one for frames in index.files.values() for one in frames):
        name = (frame.digest, frame.raw)
        if frame.pack != ZERO and name not in wanted and size + frame.raw <= most_bytes:
            wanted[name] = frame
            size += frame.raw

    def acting(buffer: mmap.mmap) -> Callable[[Frame, tuple[bytes, int]], None]:
        def keep(frame: Frame, name: tuple[bytes, int]) -> None:
            found[name] = buffer[: frame.raw]

        return keep

    with PackReader(packs, index) as reader:
        carry_out(reader, ((frame, name) for name, frame in wanted.items()), size, acting, going_on)
    return found


def _is_keyed(index: Index) -> bool:
    """Digests of an encrypted image are its own: they tell nothing about another one's frames."""
    return any(pack.key for pack in index.packs)


class WarmFrames:
    """The frames of an image, those that are warm from memory. A FrameSource."""

    def __init__(self, source: FrameSource, index: Index, found: Warm) -> None:
        self._source = source
        self._warm = {} if _is_keyed(index) else found

    def threads(self, size: int) -> int:
        """As many as the source."""
        return self._source.threads(size)

    def read(self, frame: Frame) -> memoryview:
        """As the source: few are read one by one."""
        return self._source.read(frame)

    def stream(self, wanted: Iterator[tuple[Frame, Work]], buffer: mmap.mmap) -> Iterator[tuple[Frame, Work]]:
        """Each frame in turn, its raw bytes then in `buffer`."""
        for frame, work in wanted:
            raw = self._warm.get((frame.digest, frame.raw))
            if raw is None:
                yield from self._source.stream(iter([(frame, work)]), buffer)
                continue
            buffer[: frame.raw] = raw
            yield frame, work

    def verify_zero(self, frame: Frame) -> None:
        """As the source."""
        self._source.verify_zero(frame)

    def cut(self) -> None:
        """As the source."""
        self._source.cut()

    def close(self) -> None:
        """Let both go."""
        self._warm = {}
        self._source.close()

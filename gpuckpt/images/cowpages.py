"""Whether a parent and a child still share a mapping copy-on-write, told by what is in the pages.

Only CRIU can bring shared pages back as one copy, so a mapping that both have goes through CRIU. But
processes that were forked allocate at the same addresses too, and then nothing is shared: of large
mappings some pages are compared, spread over all of them. Where a mapping of which less than about a
twentieth is shared is taken for unshared, that part comes back as two copies, each with the right bytes.
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate
from typing import TYPE_CHECKING

from gpuckpt.images.pagemaps import PAGE, PRESENT

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gpuckpt.images.framesource import FrameSource
    from gpuckpt.images.packindex import Frame
    from gpuckpt.images.pagemaps import Pagemap

WORTH_BYTES = 16 << 20
"""Where both have fewer pages than this in common, asking costs more than it gives."""

SAMPLES = 64
_ZERO_PAGE = bytes(PAGE)


class Pages:
    """The pages of one process, by address."""

    def __init__(self, pagemap: Pagemap, frames: tuple[Frame, ...], reader: FrameSource) -> None:
        self._addresses = pagemap.addresses
        self._counts = pagemap.counts
        self._flags = pagemap.flags
        present = (n if f & PRESENT else 0 for n, f in zip(pagemap.counts, pagemap.flags, strict=True))
        self._before = [0, *accumulate(present)]
        self._frames = frames
        self._starts = [frame.offset for frame in frames]
        self._reader = reader

    def runs(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        """What is present of [start, end), as address ranges in order."""
        index = max(0, bisect_right(self._addresses, start) - 1)
        while index < len(self._addresses) and self._addresses[index] < end:
            low = max(start, self._addresses[index])
            high = min(end, self._addresses[index] + self._counts[index] * PAGE)
            if low < high and self._flags[index] & PRESENT:
                yield low, high
            index += 1

    def read(self, address: int) -> bytes:
        """The verified content of a page that is present. Raises ImageCorrupt."""
        index = bisect_right(self._addresses, address) - 1
        offset = self._before[index] * PAGE + address - self._addresses[index]
        frame = self._frames[bisect_right(self._starts, offset) - 1]
        head = offset - frame.offset
        found = bytes(self._reader.read(frame)[head : head + PAGE])
        if len(found) == PAGE:
            return found
        # A page that two frames share: frames may end at any byte.
        following = self._frames[bisect_right(self._starts, offset)]
        return found + bytes(self._reader.read(following)[: PAGE - len(found)])


def seems_shared(one: Pages, other: Pages, start: int, end: int) -> bool:
    """Whether two processes seem to share pages of a mapping that both have at [start, end)."""
    common = list(_common(one.runs(start, end), other.runs(start, end)))
    total = sum(high - low for low, high in common) // PAGE
    if total * PAGE < WORTH_BYTES:
        return total > 0
    return any(
        (page := one.read(address)) != _ZERO_PAGE and page == other.read(address) for address in _spread(common, total)
    )


def _common(left: Iterator[tuple[int, int]], right: Iterator[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """What is in both lists of ranges."""
    a, b = next(left, None), next(right, None)
    while a is not None and b is not None:
        low, high = max(a[0], b[0]), min(a[1], b[1])
        if low < high:
            yield low, high
        if a[1] <= b[1]:
            a = next(left, None)
        else:
            b = next(right, None)


def _spread(ranges: list[tuple[int, int]], total: int) -> Iterator[int]:
    """SAMPLES page addresses, evenly spread over the ranges' `total` pages."""
    before = [0, *accumulate((high - low) // PAGE for low, high in ranges)]
    for sample in range(SAMPLES):
        page = sample * (total - 1) // (SAMPLES - 1)
        index = bisect_right(before, page) - 1
        yield ranges[index][0] + (page - before[index]) * PAGE

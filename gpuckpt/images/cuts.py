"""Where frames end: at addresses, so that equal memory gives equal frames in two dumps.

CRIU writes the pages of a process one behind the other. Cut every 4 MiB of that file, one page more
near its beginning changes every later frame. So frames of a large mapping end where the address
crosses a window of FRAME_BYTES, counted from the mapping's start, or, with a base image, from where the
base counted for the mapping that lay there: mappings grow downwards, too, and merge.

All of this is a hint: a wrong cut costs sharing between images, never correctness.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gpuckpt.images.packindex import FRAME_BYTES, Window

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

LARGE_BYTES = 1 << 20
"""Mappings with less to save share frames with their neighbours: a process can have 60,000 of them."""

SMALLEST_BYTES = 256 << 10
"""No cut before that much: a reservation of terabytes may hold one page in each window."""


@dataclass(slots=True)
class Cuts:
    """The places where frames of one pages file end."""

    places: list[int] = field(default_factory=list)
    """Offsets in the pages file, ascending."""
    windows: list[Window] = field(default_factory=list)

    def end_of(self, offset: int) -> int:
        """The furthest end of a frame that begins at `offset`."""
        furthest = offset + FRAME_BYTES
        next_place = bisect_right(self.places, offset)
        return min(furthest, self.places[next_place]) if next_place < len(self.places) else furthest


def cut(
    pid: int,
    mappings: Iterable[tuple[int, int]],
    runs: Sequence[tuple[int, int]],
    known: Sequence[Window] = (),
) -> Cuts:
    """Cuts for the pages file of a process.

    `mappings` and `runs` (the pages to be saved) are (start, end), ascending; `known` are the base's windows.
    """
    cutter = _Cutter(pid, [window for window in known if window.pid == pid])
    for (start, end), pieces in _by_mapping(mappings, runs):
        cutter.mapping(start, end, pieces)
    return cutter.cuts


def _by_mapping(
    mappings: Iterable[tuple[int, int]], runs: Sequence[tuple[int, int]]
) -> Iterator[tuple[tuple[int, int], list[tuple[int, int]]]]:
    """Each mapping that has pages, with the runs in it."""
    number = 0
    for start, end in mappings:
        pieces: list[tuple[int, int]] = []
        while number < len(runs) and runs[number][0] < end:
            first, last = max(start, runs[number][0]), min(end, runs[number][1])
            if first < last:
                pieces.append((first, last))
            if runs[number][1] > end:
                break  # the rest of it lies in the next mapping
            number += 1
        if pieces:
            yield (start, end), pieces


class _Cutter:
    def __init__(self, pid: int, known: Sequence[Window]) -> None:
        self.cuts = Cuts()
        self._pid = pid
        self._known = known
        self._offset = 0
        self._last = 0
        """The place of the last cut."""

    def mapping(self, start: int, end: int, pieces: list[tuple[int, int]]) -> None:
        size = sum(last - first for first, last in pieces)
        if size < LARGE_BYTES:
            self._offset += size
            self._cut(self._offset, LARGE_BYTES)
            return
        self._cut(self._offset, 1)
        origin = self._origin(start, end)
        self.cuts.windows.append(Window(self._pid, start, end, origin))
        before = pieces[0][0]
        for first, last in pieces:
            if _window(before, origin) != _window(first, origin):
                self._cut(self._offset, SMALLEST_BYTES)
            self._run(first, last, origin)
            before = last - 1
        self._cut(self._offset, 1)

    def _run(self, first: int, last: int, origin: int) -> None:
        crossing = origin + (_window(first, origin) + 1) * FRAME_BYTES
        while crossing < last:
            self._cut(self._offset + crossing - first, SMALLEST_BYTES)
            crossing += FRAME_BYTES
        self._offset += last - first

    def _cut(self, place: int, at_least: int) -> None:
        if place - self._last >= at_least:
            self.cuts.places.append(place)
            self._last = place

    def _origin(self, start: int, end: int) -> int:
        """Where the base counted from for the mapping that shares most with this one; else our own start."""
        best, origin = 0, start
        for window in self._known:
            common = min(end, window.end) - max(start, window.start)
            if common > best:
                best, origin = common, window.origin
        return origin


def _window(address: int, origin: int) -> int:
    return (address - origin) // FRAME_BYTES

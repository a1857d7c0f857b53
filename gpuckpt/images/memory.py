"""Which memory of an image is written into the restored processes by us, and what is left to CRIU.

CRIU reads memory with one thread a process. So each large private mapping is taken out of CRIU's sight
(its pages are not in the pagemap that CRIU reads) and written from many threads once the tree is there
and held. What stays with CRIU: shared memory, files, read-only and special mappings, small ones, and
what a process shares copy-on-write with its parent: written by us the pages would be two copies.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from typing import TYPE_CHECKING

from gpuckpt.images import criuformat, pagemaps, wire
from gpuckpt.images.cowpages import Pages, seems_shared
from gpuckpt.images.pagemaps import LAZY, PAGE, PRESENT, Mapping, Pagemap
from gpuckpt.model.errors import ImageCorrupt
from gpuckpt.model.records import dataclass

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from collections.abc import Mapping as Dict
    from pathlib import Path

    from gpuckpt.images.criuformat import ImageProcess
    from gpuckpt.images.framesource import FrameSource
    from gpuckpt.images.packindex import Frame

MIN_MAPPING_BYTES = 1 << 20
"""Smaller mappings hold next to nothing of a large process, and each costs an entry of the list."""

_READ_WRITE = 3
_PRIVATE, _SHARED, _ANONYMOUS = 0x02, 0x01, 0x20
_UNFIT_FLAGS = _SHARED | 0x100 | 0x40000
"""MAP_SHARED, MAP_GROWSDOWN (the stack), MAP_HUGETLB."""
_REGULAR, _HEAP, _ANON_PRIVATE = 1 << 0, 1 << 5, 1 << 9
_PLAIN_STATUS = _REGULAR | _HEAP | _ANON_PRIVATE
"""Any other bit (image.h in CRIU) makes a mapping special: vdso, aio ring, shadow stack, guard, uprobes …"""

_HUGE_PAGES, _LOCKED = 1 << 14, 0x2000
"""MADV_HUGEPAGE in the advice, MAP_LOCKED in the flags."""

_AGAIN = "copy the image again, or restore another one"

Range = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Pieces:
    """Runs of pages in one pages file, rising by offset: `lengths[n]` bytes at `offsets[n]` belong to `addresses[n]`.

    Columns of numbers, for a large process has a million of them.
    """

    addresses: array[int]
    offsets: array[int]
    lengths: array[int]

    def __len__(self) -> int:
        return len(self.offsets)

    @property
    def bytes(self) -> int:
        """All lengths together."""
        return sum(self.lengths)

    def within(self, offset: int, length: int) -> Iterator[tuple[int, int, int]]:
        """What of these pieces lies in a part of the file: (address, offset from the part's start, length)."""
        end = offset + length
        index = max(0, bisect_right(self.offsets, offset) - 1)
        while index < len(self.offsets) and self.offsets[index] < end:
            first = max(offset, self.offsets[index])
            last = min(end, self.offsets[index] + self.lengths[index])
            if first < last:
                yield self.addresses[index] + first - self.offsets[index], first - offset, last - first
            index += 1


@dataclass(frozen=True, slots=True)
class Split:
    """A process's pages divided: the pagemap that CRIU reads, what is injected, what stays in CRIU's pages file."""

    pagemap: bytes
    injected: Pieces
    kept: tuple[Range, ...]
    """(offset, length) in the whole pages file, in order: the small pages file is these one after the other."""


@dataclass(frozen=True, slots=True)
class ProcessMemory:
    """What is done with the memory of one process."""

    pid: int
    pages: str
    """Its pages file."""
    split: Split
    small_pages: tuple[Range, ...] = ()
    """Mappings of pages that the kernel makes one by one, and not before they are wanted: rising, whole."""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """What is injected, process by process; everything else in the image is CRIU's."""

    processes: tuple[ProcessMemory, ...]

    @property
    def bytes_injected(self) -> int:
        """All that is written by us."""
        return sum(one.split.injected.bytes for one in self.processes)


def is_injectable(mapping: Mapping) -> bool:
    """A private, writable, anonymous mapping without anything special."""
    return (
        mapping.prot & _READ_WRITE == _READ_WRITE
        and mapping.flags & _PRIVATE != 0
        and mapping.flags & _ANONYMOUS != 0
        and not mapping.flags & _UNFIT_FLAGS
        and mapping.status & _ANON_PRIVATE != 0
        and not mapping.status & ~_PLAIN_STATUS
    )


def subtract(ranges: Iterable[Range], holes: Iterable[Range]) -> tuple[Range, ...]:
    """What of the ranges is in no hole, both in any order and overlapping or not; the result rises."""
    cuts = _merged(holes)
    starts = [low for low, _ in cuts]
    return tuple(
        (low, high)
        for start, end in _merged(ranges)
        for low, high, is_hole in _cut(start, end, cuts, starts)
        if not is_hole
    )


def without(one: Range, holes: Iterable[Range]) -> tuple[Range, ...]:
    """As `subtract`, for one range of many and holes of which few lie in it."""
    near = [(low, high) for low, high in holes if low < one[1] and one[0] < high]
    return subtract([one], near) if near else (one,)


def _merged(ranges: Iterable[Range]) -> list[Range]:
    out: list[Range] = []
    for low, high in sorted(ranges):
        if out and low <= out[-1][1]:
            out[-1] = (out[-1][0], max(high, out[-1][1]))
        else:
            out.append((low, high))
    return out


def split(pagemap: Pagemap, ranges: Sequence[Range]) -> Split:
    """Divide a process's pages: those within `ranges` (rising, of whole pages) are injected, the others kept."""
    injected = Pieces(array("Q"), array("Q"), array("Q"))
    kept: list[Range] = []
    entries: list[tuple[int, int, int]] = []
    starts = [start for start, _ in ranges]
    offset = 0
    for address, count, flags in zip(pagemap.addresses, pagemap.counts, pagemap.flags, strict=True):
        if not flags & PRESENT:
            entries.append((address, count, flags))
            continue
        for first, last, inside in _cut(address, address + count * PAGE, ranges, starts):
            at, length = offset + first - address, last - first
            if inside:
                _add(injected, first, at, length)
            else:
                entries.append((first, length // PAGE, flags))
                _extend(kept, at, length)
        offset += count * PAGE
    return Split(pagemaps.encode_pagemap(pagemap.head, entries), injected, tuple(kept))


def _cut(start: int, end: int, ranges: Sequence[Range], starts: Sequence[int]) -> Iterator[tuple[int, int, bool]]:
    """[start, end) cut where ranges begin and end: (first, last, whether it is inside a range)."""
    index = max(0, bisect_right(starts, start) - 1)
    at = start
    while index < len(ranges) and ranges[index][0] < end:
        low, high = max(at, ranges[index][0]), min(end, ranges[index][1])
        if low < high:
            if at < low:
                yield at, low, False
            yield low, high, True
            at = high
        index += 1
    if at < end:
        yield at, end, False


def _add(pieces: Pieces, address: int, offset: int, length: int) -> None:
    """Append a piece, joined to the last one where both address and offset go on."""
    if len(pieces):
        last = pieces.lengths[-1]
        if pieces.addresses[-1] + last == address and pieces.offsets[-1] + last == offset:
            pieces.lengths[-1] = last + length
            return
    pieces.addresses.append(address)
    pieces.offsets.append(offset)
    pieces.lengths.append(length)


def _extend(kept: list[Range], offset: int, length: int) -> None:
    if kept and sum(kept[-1]) == offset:
        kept[-1] = (kept[-1][0], kept[-1][1] + length)
    else:
        kept.append((offset, length))


def plan(
    directory: Path,
    frames: Dict[str, tuple[Frame, ...]],
    reader: FrameSource,
    minimum: int = MIN_MAPPING_BYTES,
    huge: Dict[int, Sequence[Range]] | None = None,
) -> MemoryPlan:
    """What to inject of the image whose small CRIU files lie in `directory`.

    `huge`: what will have huge pages, of each process (its pid in the image), beside what had asked for them.
    Raises ImageCorrupt, also where the pages files do not fit the pagemaps.
    """
    return _Planner(directory, frames, reader, minimum, huge or {}).plan()


class _Planner:
    """One plan under work; remembers what it has read."""

    def __init__(
        self,
        directory: Path,
        frames: Dict[str, tuple[Frame, ...]],
        reader: FrameSource,
        minimum: int,
        huge: Dict[int, Sequence[Range]],
    ) -> None:
        self._directory = directory
        self._frames = frames
        self._reader = reader
        self._huge = huge
        self._processes = criuformat.read_process_list(directory / criuformat.PSTREE)
        self._large = {one.pid: self._anonymous(one.pid, minimum) for one in self._processes}
        self._otherwise = {
            pid: {(one.start, one.end) for one in found if one.advice & _HUGE_PAGES or one.flags & _LOCKED}
            for pid, found in self._large.items()
        }
        """Mappings of huge pages, and those whose pages are all there at once."""
        self._pagemaps: dict[int, Pagemap] = {}
        self._pages: dict[int, Pages] = {}
        self._judged: dict[tuple[int, int, Range], bool] = {}

    def plan(self) -> MemoryPlan:
        planned = (self._process(one) for one in self._processes)
        return MemoryPlan(tuple(one for one in planned if one is not None))

    def _process(self, process: ImageProcess) -> ProcessMemory | None:
        """None where nothing is injected."""
        candidates = self._candidates(process)
        if not candidates:
            return None
        pagemap = self._pagemap(process.pid)
        if not _is_plain(pagemap):
            return None  # a parent image, or a form of a later CRIU: CRIU knows what to do with it
        divided = split(pagemap, subtract(candidates, self._untouchable(process)))
        if not len(divided.injected):
            return None
        pages = pagemaps.pages_file(pagemap.pages_id)
        fresh: list[Range] = []
        if all(frame.raw % PAGE == 0 for frame in self._frames[pages]):  # as we write them: only pages can be filled
            fresh = sorted(set(candidates) - self._otherwise[process.pid])
        huge = self._huge.get(process.pid, ())
        small = tuple(part for one in fresh for part in without(one, huge)) if huge else tuple(fresh)
        return ProcessMemory(process.pid, pages, divided, small)

    def _candidates(self, process: ImageProcess) -> list[Range]:
        """The mappings that are fit for it and not shared with the parent or a child."""
        relatives = [one.pid for one in self._processes if one.ppid == process.pid] + [process.ppid]
        theirs = {(near.start, near.end, pid) for pid in relatives for near in self._large.get(pid, ())}
        return [
            (one.start, one.end)
            for one in self._large[process.pid]
            if is_injectable(one)
            and not any(
                (one.start, one.end, pid) in theirs and self._is_shared(process.pid, pid, (one.start, one.end))
                for pid in relatives
            )
        ]

    def _is_shared(self, pid: int, other: int, where: Range) -> bool:
        key = (min(pid, other), max(pid, other), where)
        if key not in self._judged:
            plain = all(_is_plain(self._pagemap(one)) for one in (pid, other))
            self._judged[key] = not plain or seems_shared(self._pages_of(pid), self._pages_of(other), *where)
        return self._judged[key]

    def _pages_of(self, pid: int) -> Pages:
        if pid not in self._pages:
            pagemap = self._pagemap(pid)
            frames = self._frames[pagemaps.pages_file(pagemap.pages_id)]
            self._pages[pid] = Pages(pagemap, frames, self._reader)
        return self._pages[pid]

    def _anonymous(self, pid: int, minimum: int) -> tuple[Mapping, ...]:
        """A process's large anonymous mappings; none for one that had ended (a zombie has no memory)."""
        path = self._directory / f"mm-{pid}.img"
        found = pagemaps.decode_mappings(wire.read_image(path), str(path)) if path.exists() else ()
        return tuple(one for one in found if one.size >= minimum and one.flags & _ANONYMOUS)

    def _pagemap(self, pid: int) -> Pagemap:
        """A process's pagemap, which fits its pages file."""
        if pid not in self._pagemaps:
            path = self._directory / f"pagemap-{pid}.img"
            pagemap = pagemaps.decode_pagemap(wire.read_image(path), str(path))
            name = pagemaps.pages_file(pagemap.pages_id)
            frames = self._frames.get(name, ())
            size = frames[-1].offset + frames[-1].raw if frames else 0
            if size != pagemap.file_bytes and _is_plain(pagemap):
                raise ImageCorrupt(f"{path}: {name} has {size} bytes, it needs {pagemap.file_bytes}", _AGAIN)
            self._pagemaps[pid] = pagemap
        return self._pagemaps[pid]

    def _untouchable(self, process: ImageProcess) -> Iterator[Range]:
        for tid in {process.pid, *process.threads}:
            path = self._directory / f"core-{tid}.img"
            yield from pagemaps.decode_untouchable(wire.read_image(path), str(path))


def _is_plain(pagemap: Pagemap) -> bool:
    return not any(flags & ~(LAZY | PRESENT) for flags in pagemap.flags)

"""What the memory of an image consists of: which kind each piece of a pages file is, and what is stored of it."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import field
from typing import TYPE_CHECKING

from gpuckpt.images import criuformat, pagemaps, wire
from gpuckpt.images.packindex import ZERO
from gpuckpt.images.pagemaps import PAGE, PRESENT
from gpuckpt.model.errors import ImageCorrupt
from gpuckpt.model.inspection import KINDS, Block, MemoryChange, MemoryKind, MemoryPicture, ProcessMemory
from gpuckpt.model.records import dataclass

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from gpuckpt.images.criuformat import ImageProcess
    from gpuckpt.images.packindex import Frame
    from gpuckpt.images.pagemaps import Mapping as Area

    Frames = Mapping[str, Sequence[Frame]]

_STACK, _HEAP, _FILE_PRIVATE, _FILE_SHARED = 1 << 1, 1 << 5, 1 << 6, 1 << 7
_ANON_SHARED, _ANON_PRIVATE, _SYSVIPC, _MEMFD = 1 << 8, 1 << 9, 1 << 10, 1 << 14
"""Status bits of a mapping (image.h in CRIU)."""
_GROWSDOWN = 0x100

_LARGEST_STACK = 64 << 20
"""Runtimes that have their stacks in the heap (Go) keep them in areas from this size on."""

_MOST_BLOCKS = 384
"""So many blocks make six lines of a terminal."""
_SMALLEST_BLOCK = PAGE
_AGAIN = "copy the image again, or restore another one"


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of memory of one kind that lies in one frame."""

    pid: int
    """0: shared memory, which belongs to no process alone."""
    kind: str
    held: int
    """Bytes."""
    frame: Frame | None
    """None in an image without packs."""


def pieces(
    criu: Path, frames: Frames | None, gpu_bytes: Mapping[int, int], going_on: Callable[[], None] = lambda: None
) -> Iterator[Piece]:
    """All memory of the image whose small CRIU files lie in `criu`, process by process, rising by address.

    `frames` is the index's, None for an image without packs; `gpu_bytes` the GPU memory of each CUDA process.
    `going_on` is called now and then and may raise. Raises ImageCorrupt.
    """
    for process in criuformat.read_process_list(criu / criuformat.PSTREE):
        path = criu / f"mm-{process.pid}.img"
        if path.exists():  # a zombie has no memory
            going_on()
            found = pagemaps.decode_mappings(wire.read_image(path), str(path))
            areas = _Areas(found, set(_stack_pointers(criu, process)), gpu_bytes.get(process.pid, 0))
            yield from _pieces_of(process.pid, criu / f"pagemap-{process.pid}.img", frames, areas.cut)
    for path in sorted(criu.glob("pagemap-shmem-*.img")):
        going_on()
        yield from _pieces_of(0, path, frames, lambda start, end: [("shared", end - start)])


def _stack_pointers(criu: Path, process: ImageProcess) -> Iterator[int]:
    for tid in {process.pid, *process.threads}:
        path = criu / f"core-{tid}.img"
        if path.exists():
            yield pagemaps.decode_stack_pointer(wire.read_image(path), str(path))


class _Areas:
    """The mappings of one process, by kind."""

    def __init__(self, areas: Iterable[Area], stacks: set[int], gpu_bytes: int) -> None:
        self._areas = sorted(areas, key=lambda area: area.start)
        self._starts = [area.start for area in self._areas]
        self._kinds = [_kind(area, stacks) for area in self._areas]
        self._mark_gpu_copy(gpu_bytes)

    def _mark_gpu_copy(self, gpu_bytes: int) -> None:
        """The driver keeps its copy in one anonymous mapping, about as large as the GPU memory in use.

        Nothing names it; what comes near in size is taken for it.
        """
        sizes = {n: area.size for n, area in enumerate(self._areas) if self._kinds[n] == "anonymous"}
        largest = max(sizes, key=lambda n: sizes[n], default=None)
        if largest is not None and gpu_bytes // 2 <= sizes[largest] <= 2 * gpu_bytes:
            self._kinds[largest] = "GPU copy"

    def cut(self, start: int, end: int) -> Iterator[tuple[str, int]]:
        """The kinds in a run of pages, with their bytes, in order. What is in no mapping is special."""
        while start < end:
            index = bisect_right(self._starts, start) - 1
            inside = index >= 0 and start < self._areas[index].end
            following = self._starts[index + 1] if index + 1 < len(self._starts) else end
            stop = min(end, self._areas[index].end if inside else following)
            yield self._kinds[index] if inside else "special", stop - start
            start = stop


def _kind(area: Area, stacks: Iterable[int]) -> str:
    status = area.status
    if status & _HEAP:
        return "heap"
    if status & _STACK or area.flags & _GROWSDOWN:
        return "stacks"
    if status & (_FILE_PRIVATE | _FILE_SHARED):
        return "files"
    if status & (_ANON_SHARED | _SYSVIPC | _MEMFD):
        return "shared"
    if not status & _ANON_PRIVATE:
        return "special"
    small = area.size < _LARGEST_STACK
    return "stacks" if small and any(area.start <= pointer < area.end for pointer in stacks) else "anonymous"


def _pieces_of(
    pid: int, path: Path, frames: Frames | None, cut: Callable[[int, int], Iterable[tuple[str, int]]]
) -> Iterator[Piece]:
    pagemap = pagemaps.decode_pagemap(wire.read_image(path), str(path))
    name = pagemaps.pages_file(pagemap.pages_id)
    known = None if frames is None else frames.get(name, ())
    if known is not None and (known[-1].offset + known[-1].raw if known else 0) != pagemap.file_bytes:
        raise ImageCorrupt(f"{path}: {name} does not have the {pagemap.file_bytes} bytes it needs", _AGAIN)
    runs = (
        part
        for address, count, flags in zip(pagemap.addresses, pagemap.counts, pagemap.flags, strict=True)
        if flags & PRESENT
        for part in cut(address, address + count * PAGE)
    )
    return _in_frames(pid, runs, known)


def _in_frames(pid: int, runs: Iterable[tuple[str, int]], frames: Sequence[Frame] | None) -> Iterator[Piece]:
    """Cut runs, which follow each other in a pages file, where its frames end."""
    if frames is None:
        yield from (Piece(pid, kind, length, None) for kind, length in runs)
        return
    number, left = 0, frames[0].raw if frames else 0
    for kind, length in runs:
        while length:
            taken = min(length, left)
            yield Piece(pid, kind, taken, frames[number])
            length, left = length - taken, left - taken  # noqa: PLW2901 - what is left of the run
            if not left and number + 1 < len(frames):
                number, left = number + 1, frames[number + 1].raw


def picture(found: Iterable[Piece], raw_bytes: int) -> MemoryPicture:
    """Memory by kind and by process. `raw_bytes` is about all of it: by that the blocks are sized."""
    block = _SMALLEST_BLOCK
    while block * _MOST_BLOCKS < raw_bytes:
        block *= 2
    kinds: dict[str, _Tally] = {}
    processes: dict[int, _Tally] = {}
    written: dict[tuple[int, int], Frame] = {}
    for piece in found:
        stored, zero = _stored(piece, written), piece.frame is not None and piece.frame.pack == ZERO
        for tally in (kinds.setdefault(piece.kind, _Tally(block)), processes.setdefault(piece.pid, _Tally(0))):
            tally.add(piece.held, stored, zero=zero)
    ordered = tuple(kinds[kind].as_kind(kind) for kind in KINDS if kind in kinds)
    own = (ProcessMemory(pid, one.held, round(one.stored)) for pid, one in processes.items() if pid)
    return MemoryPicture(block, ordered, tuple(own))


def _stored(piece: Piece, written: dict[tuple[int, int], Frame]) -> float:
    """Its share of what its frame takes; what an earlier frame has written already takes nothing more."""
    frame = piece.frame
    if frame is None:
        return piece.held
    first = written.setdefault((frame.pack, frame.at), frame) is frame
    return frame.stored * piece.held / frame.raw if first else 0.0


@dataclass(slots=True)
class _Tally:
    """A sum under work, and its blocks where they have a size."""

    block_bytes: int
    held: int = 0
    zero: int = 0
    stored: float = 0.0
    blocks: list[list[float]] = field(default_factory=list)

    def add(self, held: int, stored: float, *, zero: bool) -> None:
        """Count a piece."""
        at, self.held, self.stored = self.held, self.held + held, self.stored + stored
        self.zero += held if zero else 0
        while self.block_bytes and at < self.held:
            if at % self.block_bytes == 0:
                self.blocks.append([0, 0.0])
            part = min(self.held - at, self.block_bytes - at % self.block_bytes)
            self.blocks[-1][0] += part
            self.blocks[-1][1] += stored * part / held
            at += part

    def as_kind(self, kind: str) -> MemoryKind:
        """The result."""
        blocks = tuple(Block(int(held), round(stored)) for held, stored in self.blocks)
        return MemoryKind(kind, self.held, self.zero, round(self.stored), blocks)


def changes(here: Iterable[Piece], other: Iterable[Piece]) -> tuple[MemoryChange, ...]:
    """How much of each kind is memory that the other image does not hold, wherever it holds it."""
    held_there: dict[str, int] = {}
    digests: set[bytes] = set()
    for piece in other:
        held_there[piece.kind] = held_there.get(piece.kind, 0) + piece.held
        if piece.frame is not None:
            digests.add(piece.frame.digest)
    held: dict[str, int] = {}
    changed: dict[str, int] = {}
    unknown = not digests and bool(held_there)
    for piece in here:
        held[piece.kind] = held.get(piece.kind, 0) + piece.held
        unknown |= piece.frame is None
        if piece.frame is not None and piece.frame.digest not in digests:
            changed[piece.kind] = changed.get(piece.kind, 0) + piece.held
    return tuple(
        MemoryChange(kind, held.get(kind, 0), held_there.get(kind, 0), None if unknown else changed.get(kind, 0))
        for kind in KINDS
        if kind in held or kind in held_there
    )

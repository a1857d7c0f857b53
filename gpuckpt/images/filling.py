"""How pieces of a frame come into a held process: fresh pages by userfaultfd, all others by process_vm_writev.

The first takes half the time (system/userfault.py), but one call for each piece: it is for processes whose memory
lies in long runs, and for mappings of which the kernel makes small pages.
"""

from __future__ import annotations

import errno
from bisect import bisect_right
from typing import TYPE_CHECKING

from gpuckpt.system import procfs
from gpuckpt.system.memory_io import Writer
from gpuckpt.system.userfault import Userfault

if TYPE_CHECKING:
    import mmap
    from collections.abc import Iterator, Mapping, Sequence

    from gpuckpt.images.memory import MemoryPlan, ProcessMemory

PAGE = 4096
WORTH_BYTES = 16 << 20
"""Of a process; for fewer, its part in making the descriptor takes longer than it saves."""
WORTH_RUN_BYTES = 64 << 10
"""A piece, on the average."""

Piece = tuple[int, int, int]
"""Address there, offset in the buffer, length."""


def worth_filling(plan: MemoryPlan) -> tuple[int, ...]:
    """The processes (pids of the plan) whose memory shall be filled by userfaultfd where that is to be had."""
    return tuple(one.pid for one in plan.processes if one.small_pages and _is_long(one))


def _is_long(memory: ProcessMemory) -> bool:
    size = memory.split.injected.bytes
    return size >= WORTH_BYTES and size >= WORTH_RUN_BYTES * len(memory.split.injected)


class Door:
    """The way into the fresh memory of one process. For any number of threads."""

    def __init__(self, userfault: Userfault, ranges: Sequence[tuple[int, int]]) -> None:
        """Takes the descriptor over. `ranges` rise, each of one mapping; those that cannot be registered are left."""
        self._userfault = userfault
        self._ranges = [(start, end) for start, end in ranges if userfault.register(start, end)]
        self._starts = [start for start, _ in self._ranges]

    def parted(self, piece: Piece) -> Iterator[tuple[Piece, bool]]:
        """A piece cut where the ranges begin and end, and whether each part lies in one."""
        address, offset, length = piece
        end = address + length
        index = max(0, bisect_right(self._starts, address) - 1)
        at = address
        while at < end and index < len(self._ranges):
            first, last = self._ranges[index]
            if at < min(first, end):
                yield (at, offset + at - address, min(first, end) - at), False
                at = min(first, end)
            if first <= at < min(last, end):
                yield (at, offset + at - address, min(last, end) - at), True
                at = min(last, end)
            index += 1
        if at < end:
            yield (at, offset + at - address, end - at), False

    def copy(self, address: int, source: int, length: int) -> int:
        """As Userfault.copy."""
        return self._userfault.copy(address, source, length)

    def close(self) -> None:
        """The memory is as any other."""
        self._userfault.close()


def open_doors(plan: MemoryPlan, owner_pid: int, descriptors: Mapping[int, int]) -> dict[int, Door]:
    """For each process (its pid here) the way into it that the owner has made: pid -> the owner's descriptor.

    Where one cannot be used there is none: the memory is written in the other way.
    """
    doors: dict[int, Door] = {}
    for memory in plan.processes:
        if memory.pid in descriptors:
            try:
                userfault = Userfault(procfs.duplicate(owner_pid, descriptors[memory.pid]))
            except OSError:
                continue
            doors[memory.pid] = Door(userfault, memory.small_pages)
    return doors


class Filler:
    """Brings pieces of one buffer into processes. One for each thread."""

    def __init__(self, buffer: mmap.mmap, doors: Mapping[int, Door]) -> None:
        self._writer = Writer(buffer)
        self._doors = doors
        self.filled = 0
        """Bytes that came into fresh pages by userfaultfd."""

    def write(self, pid: int, pieces: Sequence[Piece]) -> None:
        """Write all of them. Raises ProcessLookupError when the process has ended, OSError."""
        door = self._doors.get(pid)
        if door is None:
            self._writer.write(pid, pieces)
            return
        self._writer.require_inside(pieces)
        others: list[Piece] = []
        for part, is_fresh in (found for piece in pieces for found in door.parted(piece)):
            if is_fresh:
                self._fill(pid, door, part)
            else:
                others.append(part)
        if others:
            self._writer.write(pid, others)

    def _fill(self, pid: int, door: Door, piece: Piece) -> None:
        """Fill the pages that are not there, and write to those that are: more at once, the more they are in a row."""
        address, offset, length = piece
        there = PAGE
        while length:
            done = door.copy(address, self._writer.address + offset, length)
            self.filled += done
            if done < length:
                there = min(PAGE if done else there, length - done)
                done += self._write_to_those_there(pid, (address + done, offset + done, there))
                there *= 2
            address, offset, length = address + done, offset + done, length - done

    def _write_to_those_there(self, pid: int, piece: Piece) -> int:
        """Write to pages of which the first is there; to that one alone where others are not. Returns the bytes."""
        address, offset, length = piece
        try:
            return self._writer.write(pid, [piece])
        except OSError as error:
            if error.errno != errno.EFAULT or length == PAGE:
                raise
        return self._writer.write(pid, [(address, offset, PAGE)])

"""Fresh memory of a held process is filled from outside; nothing of that stays with the process."""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import os
import random
import re
import signal
import subprocess
import sys
import time
from array import array
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuckpt.images import filling
from gpuckpt.images.filling import Door, Filler
from gpuckpt.images.memory import MemoryPlan, Pieces, ProcessMemory, Split
from gpuckpt.system import procfs
from gpuckpt.system.hold import Hold, HoldError
from gpuckpt.system.memory_io import Writer
from gpuckpt.system.userfault import Userfault, of_held
from tests import harness

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")

PAGE = 4096
SIZE = 64 * PAGE
TOUCHED = (3, 17, 18, 63)
"""Pages that the program has written to."""

PROGRAM = """
import ctypes, hashlib, mmap, os, sys
os.setuid(int(sys.argv[3]))
size, touched = int(sys.argv[1]), [int(word) for word in sys.argv[2].split(",")]
area = mmap.mmap(-1, 3 * size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
for page in touched:
    area[size + page * 4096] = 7
print(ctypes.addressof(ctypes.c_char.from_buffer(area)) + size, flush=True)
for line in sys.stdin:
    print(hashlib.sha256(area[size:2 * size]).hexdigest(), area[:size] == bytes(size), area[2 * size:] == bytes(size))
    sys.stdout.flush()
"""


@pytest.fixture(params=[0, 65534], ids=["root", "nobody"])
def child(request):
    """A program with fresh memory, and where that is."""
    argv = [sys.executable, "-c", PROGRAM, str(SIZE), ",".join(map(str, TOUCHED)), str(request.param)]
    started = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    yield started, int(started.stdout.readline())
    started.kill()
    started.communicate()


@contextlib.contextmanager
def held(pid: int):
    hold = Hold(exitkill=False)
    try:
        hold.take_all(lambda: procfs.threads(pid), time.monotonic() + 10)
        yield hold
    finally:
        hold.let_go()


def way_into(hold: Hold, pid: int, address: int) -> Door:
    descriptor = of_held(hold, pid, pid)
    if descriptor is None:
        pytest.skip("this kernel has no userfaultfd, or this processor is none that we know")
    door = Door(Userfault(descriptor), [(address, address + SIZE)])
    assert door._ranges == [(address, address + SIZE)]
    return door


def open_files(pid: int) -> set[str]:
    return {entry.name for entry in Path(f"/proc/{pid}/fd").iterdir()}


def is_registered(pid: int) -> bool:
    """Whether any mapping has a flag of userfaultfd's (um, uw, ui)."""
    found = re.findall(r"^VmFlags:(.*)$", Path(f"/proc/{pid}/smaps").read_text(), re.MULTILINE)
    return any({"um", "uw", "ui"} & set(flags.split()) for flags in found)


def test_pages_that_are_there_and_that_are_not(child):
    program, address = child
    buffer = mmap.mmap(-1, SIZE)
    buffer[:] = random.Random(1).randbytes(SIZE)
    before = open_files(program.pid)
    with held(program.pid) as hold:
        door = way_into(hold, program.pid, address)
        assert open_files(program.pid) == before
        assert is_registered(program.pid)
        filler = Filler(buffer, {program.pid: door})
        filler.write(program.pid, [(address, 0, SIZE)])
        assert filler.filled == SIZE - len(TOUCHED) * PAGE
        door.close()
        assert not is_registered(program.pid)
    program.stdin.write("look\n")
    program.stdin.flush()
    digest = hashlib.sha256(buffer[:]).hexdigest()
    assert program.stdout.readline() == f"{digest} True True\n"


def test_pieces_that_reach_out_of_what_is_registered(child):
    """They are written, piece by piece and part by part, in the way that fits each."""
    program, address = child
    buffer = mmap.mmap(-1, 3 * SIZE)
    buffer[SIZE : 2 * SIZE] = random.Random(2).randbytes(SIZE)
    with held(program.pid) as hold:
        door = way_into(hold, program.pid, address)
        filler = Filler(buffer, {program.pid: door})
        cut = SIZE + 20 * PAGE
        filler.write(program.pid, [(address - SIZE, 0, cut), (address - SIZE + cut, cut, 3 * SIZE - cut)])
        assert filler.filled == SIZE - len(TOUCHED) * PAGE
        door.close()
    program.stdin.write("look\n")
    program.stdin.flush()
    digest = hashlib.sha256(buffer[SIZE : 2 * SIZE]).hexdigest()
    assert program.stdout.readline() == f"{digest} True True\n"


def test_pages_that_are_all_there_take_few_calls(child, monkeypatch):
    """As in memory that the program has locked."""
    program, address = child
    buffer = mmap.mmap(-1, SIZE)
    buffer[:] = random.Random(3).randbytes(SIZE)
    calls = []
    write = Writer.write
    monkeypatch.setattr(Writer, "write", lambda *args: calls.append(args) or write(*args))
    with held(program.pid) as hold:
        Writer(mmap.mmap(-1, SIZE)).write(program.pid, [(address, 0, SIZE)])
        door = way_into(hold, program.pid, address)
        filler = Filler(buffer, {program.pid: door})
        filler.write(program.pid, [(address, 0, SIZE)])
        assert filler.filled == 0
        assert len(calls) < 10
        door.close()
    program.stdin.write("look\n")
    program.stdin.flush()
    assert program.stdout.readline() == f"{hashlib.sha256(buffer[:]).hexdigest()} True True\n"


def test_a_range_that_cannot_be_registered_is_written_in_the_other_way(child):
    program, address = child
    buffer = mmap.mmap(-1, SIZE)
    buffer[:] = random.Random(4).randbytes(SIZE)
    with held(program.pid) as hold:
        descriptor = of_held(hold, program.pid, program.pid)
        if descriptor is None:
            pytest.skip("this kernel has no userfaultfd, or this processor is none that we know")
        door = Door(Userfault(descriptor), [(4096, 8192), (address, address + 8 * PAGE)])
        filler = Filler(buffer, {program.pid: door})
        filler.write(program.pid, [(address, 0, SIZE)])
        assert filler.filled == 7 * PAGE
        door.close()
    program.stdin.write("look\n")
    program.stdin.flush()
    assert program.stdout.readline() == f"{hashlib.sha256(buffer[:]).hexdigest()} True True\n"


def test_nothing_stays_open_here_where_it_ends_on_the_way(child, monkeypatch):
    program, _ = child
    duplicate = procfs.duplicate

    def deadly(pid: int, descriptor: int) -> int:
        found = duplicate(pid, descriptor)
        os.kill(pid, signal.SIGKILL)
        harness.wait_for(lambda: not harness.alive(pid), "it has ended")
        return found

    monkeypatch.setattr(procfs, "duplicate", deadly)
    with held(program.pid) as hold:
        before = open_files(os.getpid())
        with pytest.raises(HoldError):
            of_held(hold, program.pid, program.pid)
        assert open_files(os.getpid()) == before


def test_a_piece_that_is_not_in_the_buffer(child):
    program, address = child
    with pytest.raises(ValueError, match="outside"):
        Filler(mmap.mmap(-1, SIZE), {program.pid: Door(Registered(), [])}).write(program.pid, [(address, PAGE, SIZE)])


def memory_of(size: int, runs: int, *, fresh: bool = True) -> ProcessMemory:
    lengths = array("Q", [size // runs] * runs)
    split = Split(b"", Pieces(array("Q", range(runs)), array("Q", range(runs)), lengths), ())
    return ProcessMemory(size, "pages-1.img", split, ((0, size),) if fresh else ())


def test_which_processes_are_worth_it():
    large = memory_of(filling.WORTH_BYTES, 4)
    small = memory_of(filling.WORTH_BYTES - PAGE, 1)
    torn = memory_of(4 * filling.WORTH_BYTES, 8 * filling.WORTH_BYTES // filling.WORTH_RUN_BYTES)
    none = memory_of(8 * filling.WORTH_BYTES, 1, fresh=False)
    assert filling.worth_filling(MemoryPlan((large, small, torn, none))) == (large.pid,)


def test_a_descriptor_that_cannot_be_had_is_no_way():
    memory = memory_of(filling.WORTH_BYTES, 4)
    assert filling.open_doors(MemoryPlan((memory,)), os.getpid(), {memory.pid: 1 << 20}) == {}
    assert filling.open_doors(MemoryPlan((memory,)), os.getpid(), {}) == {}


def test_a_process_that_ends_meanwhile(child):
    program, address = child
    buffer = mmap.mmap(-1, SIZE)
    with held(program.pid) as hold:
        filler = Filler(buffer, {program.pid: way_into(hold, program.pid, address)})
        os.kill(program.pid, signal.SIGKILL)
        harness.wait_for(lambda: not harness.alive(program.pid), "it has ended")
        with pytest.raises(ProcessLookupError):
            filler.write(program.pid, [(address, 0, SIZE)])


class Registered:
    """Registers what begins at an even page."""

    def register(self, start: int, end: int) -> bool:
        return end > start and not start // PAGE % 2


@given(
    st.lists(st.integers(1, 60), max_size=12, unique=True).map(sorted),
    st.integers(0, 60),
    st.integers(1, 40),
)
def test_a_piece_is_cut_where_the_ranges_begin_and_end(edges, first, count):
    ranges = [(a * PAGE, b * PAGE) for a, b in zip(edges[::2], edges[1::2])]  # noqa: B905 - 3.10 on
    door = Door(Registered(), ranges)
    parts = list(door.parted((first * PAGE, 5 * PAGE, count * PAGE)))
    at = first
    for (address, offset, length), is_fresh in parts:
        assert address == at * PAGE
        assert offset == (5 + at - first) * PAGE
        assert length > 0
        inside = [
            (low, high) for low, high in ranges if low <= address and address + length <= high and not low // PAGE % 2
        ]
        assert bool(inside) is is_fresh
        touching = [1 for low, high in ranges if not low // PAGE % 2 and low < address + length and address < high]
        assert is_fresh or not touching
        at += length // PAGE
    assert at == first + count

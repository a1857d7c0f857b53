"""The pages of the driver's copy, made ahead of it: here the copy is a child's fresh mapping."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time

import pytest

from gpuckpt.model.facts import ProcessId
from gpuckpt.owner import prefault
from gpuckpt.owner.messages import CudaMember
from gpuckpt.system import memory_io, procfs
from tests import harness

MIB = 1 << 20
PROGRAM = """
import mmap, sys
held = []
print("ready", flush=True)
for line in sys.stdin:
    m = mmap.mmap(-1, int(line) << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    m.madvise(mmap.MADV_NOHUGEPAGE)
    held.append(m)
    print("mapped", flush=True)
"""


class Child:
    def __init__(self):
        argv = [sys.executable, "-c", PROGRAM]
        self.process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout.readline() == "ready\n"
        self.pid = self.process.pid

    def map(self, mib: int) -> None:
        self.process.stdin.write(f"{mib}\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "mapped\n"

    def rss(self) -> int:
        with open(f"/proc/{self.pid}/statm") as statm:
            return int(statm.read().split()[1]) * 4096

    def member(self, mib: int) -> CudaMember:
        identity = procfs.process_id(self.pid)
        assert isinstance(identity, ProcessId)
        return CudaMember(identity, 0, {"GPU-0": mib * MIB} if mib else {})


@pytest.fixture
def child():
    one = Child()
    yield one
    one.process.kill()
    one.process.communicate()


@pytest.fixture(autouse=True)
def four_cores(monkeypatch):
    """As many threads as there, whatever this machine has."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})


def test_what_is_mapped_meanwhile_comes_into_being(child):
    child.map(80)
    before = child.rss()
    with prefault.ahead_of_copies([child.member(256)]):
        child.map(128)
        harness.wait_for(lambda: child.rss() >= before + 128 * MIB, "the pages are there")
        child.map(100)  # a driver that maps twice
        harness.wait_for(lambda: child.rss() >= before + 228 * MIB, "and those of the second")
    assert child.rss() < before + 240 * MIB, "what it had before was not touched"
    assert not threads_left()


def test_no_more_than_the_memory_on_the_gpu(child):
    before = child.rss()
    with prefault.ahead_of_copies([child.member(64)]):
        child.map(512)
        harness.wait_for(lambda: child.rss() >= before + 68 * MIB, "its share is there")
        time.sleep(0.3)
        assert child.rss() < before + 80 * MIB


@pytest.mark.parametrize("members", [0, 64])
def test_nothing_for_an_unknown_size_or_small_mappings(child, members):
    before = child.rss()
    with prefault.ahead_of_copies([child.member(members)]):
        child.map(512 if not members else 60)
        time.sleep(0.3)
        assert child.rss() < before + 10 * MIB


def test_a_process_that_ends_and_a_failure_in_the_block(child):
    with pytest.raises(KeyError), prefault.ahead_of_copies([child.member(1 << 20)]):
        child.map(2048)
        child.process.kill()
        child.process.wait()
        raise KeyError
    assert not threads_left()


def test_a_limit_on_threads_is_no_failure(child, monkeypatch):
    def refuse(self):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with prefault.ahead_of_copies([child.member(64)]):
        child.map(64)


def threads_left() -> bool:
    """Of this module's: none outlives the block."""
    return any("prefault" in thread.name or "_follow" in thread.name for thread in threading.enumerate())


@pytest.mark.parametrize(
    ("spans", "others", "rest"),
    [
        ([(0, 10)], [], [(0, 10)]),
        ([(0, 10)], [(0, 10)], []),
        ([(0, 10)], [(2, 4), (6, 8)], [(0, 2), (4, 6), (8, 10)]),
        ([(0, 10), (20, 30)], [(5, 25)], [(0, 5), (25, 30)]),
        ([(0, 30)], [(20, 30)], [(0, 20)]),  # it grew downwards: the kernel joins what lies side by side
        ([(5, 10), (10, 12)], [(0, 6), (11, 40)], [(6, 10), (10, 11)]),
    ],
)
def test_what_is_new(spans, others, rest):
    assert list(prefault.without(spans, others)) == rest


def test_calls_meet_huge_pages_whole():
    size = memory_io.PREFAULT_BYTES
    pieces = list(prefault.cut(size - 4096, 3 * size + 8192))
    assert pieces == [(size - 4096, 4096), (size, size), (2 * size, size), (3 * size, 8192)]

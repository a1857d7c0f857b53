"""Writing into another process's memory."""

from __future__ import annotations

import errno
import mmap
import os
import subprocess
import sys

import pytest

from gpuckpt.system import memory_io
from gpuckpt.system.memory_io import IOV_MAX, Writer

CHILD = """
import ctypes, hashlib, mmap, sys
m = mmap.mmap(-1, 16 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
print(ctypes.addressof(ctypes.c_char.from_buffer(m)), flush=True)
for line in sys.stdin:
    print(hashlib.sha256(memoryview(m)).hexdigest(), flush=True)
"""


class Child:
    def __init__(self):
        self.process = subprocess.Popen([sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.pid, self.start = self.process.pid, int(self.process.stdout.readline())

    def digest(self) -> str:
        self.process.stdin.write(b"\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().decode().strip()


@pytest.fixture
def child():
    one = Child()
    yield one
    one.process.kill()
    one.process.communicate()


def expected(pieces, buffer, start) -> str:
    import hashlib

    memory = bytearray(16 << 20)
    for address, offset, length in pieces:
        memory[address - start : address - start + length] = buffer[offset : offset + length]
    return hashlib.sha256(memory).hexdigest()


def test_more_pieces_than_one_call_takes(child):
    buffer = bytearray(os.urandom(4 << 20))
    pieces = [(child.start + number * 5000, number * 1000, 700) for number in range(2 * IOV_MAX + 5)]
    assert Writer(buffer).write(child.pid, pieces) == 700 * len(pieces)
    assert child.digest() == expected(pieces, buffer, child.start)


def test_one_large_piece(child):
    buffer = bytearray(os.urandom(8 << 20))
    pieces = [(child.start + (4 << 20), 0, len(buffer))]
    assert Writer(buffer).write(child.pid, pieces) == len(buffer)
    assert child.digest() == expected(pieces, buffer, child.start)


def test_a_write_that_ends_early_goes_on_with_the_rest(child, monkeypatch):
    """The kernel may stop at any byte; here after 1500, in the middle of a piece."""
    buffer = bytearray(os.urandom(1 << 20))
    pieces = [(child.start + number * 3000, number * 2000, 2000) for number in range(100)]
    writer = Writer(buffer)
    real, calls = memory_io._libc.process_vm_writev, []

    def cut_short(pid, local, count, remote, _count, flags):
        first = memory_io._Iovec.from_address(local)
        calls.append(count)
        part = memory_io._Iovec(first.base, min(first.length, 1500))
        import ctypes

        return real(pid, ctypes.addressof(part), 1, remote, 1, flags)

    class Libc:
        process_vm_writev = staticmethod(cut_short)

    monkeypatch.setattr(memory_io, "_libc", Libc)
    assert writer.write(child.pid, pieces) == 200_000
    assert len(calls) == 200
    assert child.digest() == expected(pieces, buffer, child.start)


def test_memory_that_is_not_there(child):
    with pytest.raises(OSError) as caught:
        Writer(bytearray(4096)).write(child.pid, [(0, 0, 100)])
    assert caught.value.errno == errno.EFAULT


def test_a_process_that_has_ended(child):
    child.process.kill()
    child.process.wait()
    with pytest.raises(ProcessLookupError):
        Writer(bytearray(4096)).write(child.pid, [(child.start, 0, 100)])


def test_pieces_outside_of_the_buffer_are_refused(child):
    with pytest.raises(ValueError, match="outside"):
        Writer(bytearray(4096)).write(child.pid, [(child.start, 4000, 97)])


def test_whether_it_is_possible(child):
    assert memory_io.why_not(child.pid) == ""
    assert "process_vm_writev" in memory_io.why_not(2**22 + 1)


def present(pid: int, address: int) -> int:
    """Bytes of the mapping at `address` that are there."""
    with open(f"/proc/{pid}/smaps") as lines:
        next(line for line in lines if line.startswith(f"{address:x}-"))
        return int(next(line for line in lines if line.startswith("Rss:")).split()[1]) << 10


def test_prefault_makes_pages_and_changes_none(child):
    memory_io.Writer(bytearray(b"x" * 4096)).write(child.pid, [(child.start + 8192, 0, 4096)])
    before = child.digest()  # it reads all: what it had not has the page of zeros now
    with open(f"/proc/{child.pid}/pagemap", "rb") as pagemap:

        def frames():
            pagemap.seek(child.start // 4096 * 8)
            return {pagemap.read(8)[:7] for _ in range((8 << 20) // 4096)}

        for first in range(0, 8 << 20, memory_io.PREFAULT_BYTES):
            memory_io.prefault(child.pid, child.start + first, memory_io.PREFAULT_BYTES)
        if os.geteuid() == 0:
            assert len(frames()) == (8 << 20) // 4096  # each has a frame of its own, the next write finds it
    assert child.digest() == before


def test_prefault_of_untouched_memory():
    program = (
        "import ctypes, mmap\n"
        "m = mmap.mmap(-1, 16 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)\n"
        "m.madvise(mmap.MADV_NOHUGEPAGE)\n"
        "print(ctypes.addressof(ctypes.c_char.from_buffer(m)), flush=True)\n"
        "input(); print(m[:].count(0))"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        start = int(process.stdout.readline())
        assert present(process.pid, start) == 0
        memory_io.prefault(process.pid, start, memory_io.PREFAULT_BYTES)
        assert present(process.pid, start) == memory_io.PREFAULT_BYTES
        memory_io.prefault(process.pid, start + (12 << 20), 4096)
        assert present(process.pid, start) == memory_io.PREFAULT_BYTES + 4096
        process.stdin.write(b"\n")
        process.stdin.flush()
        assert int(process.stdout.readline()) == 16 << 20


def test_prefault_where_nothing_is_and_of_nobody(child):
    memory_io.prefault(child.pid, 4096, 4096)
    child.process.kill()
    child.process.wait()
    with pytest.raises(ProcessLookupError):
        memory_io.prefault(child.pid, child.start, 4096)


def test_only_writable_memory_is_written_to():
    area = mmap.mmap(-1, 4096, prot=mmap.PROT_READ, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with open("/proc/self/maps") as maps:
        start = next(
            int(line.split("-")[0], 16) for line in maps if " r--p 00000000 00:00 0" in line and "[" not in line
        )
    with pytest.raises(OSError) as caught:
        Writer(bytearray(4096)).write(os.getpid(), [(start, 0, 100)])
    assert caught.value.errno == errno.EFAULT
    area.close()

"""Memory of every sort that proves itself: memory.py KIND LOG [MEGABYTES]

Number n goes into LOG only after all of the memory was read and found as it was written at the start, so
the first number after a restore proves that every byte of it came back. What is not as it was writes
'BROKEN WHY' and ends the count.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import signal
import sys
import threading
import time
import zlib

MIB = 1 << 20
PAGE = 4096
LIBC = ctypes.CDLL(None, use_errno=True)
LIBC.mmap.restype = ctypes.c_void_p
LIBC.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS


class Area:
    """A mapping filled with bytes that do not compress, every second 64 KiB left zero, and its checksum."""

    def __init__(self, size: int, area: mmap.mmap | None = None) -> None:
        self.area = area or mmap.mmap(-1, size, flags=PRIVATE)
        for at in range(0, size, 128 << 10):
            self.area[at : at + (64 << 10)] = os.urandom(64 << 10)
        self.sum = zlib.crc32(self.area)

    def check(self) -> None:
        assert zlib.crc32(self.area) == self.sum, "memory is not what it was"


def fork(*areas: Area) -> int:
    """A child that makes an area of its own, checks all for ever and says so over a pipe."""
    out, into = os.pipe()
    child = os.fork()
    if child == 0:
        LIBC.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        own = Area(len(areas[0].area))
        while True:
            for area in (*areas, own):
                area.check()
            os.write(into, b".")
            time.sleep(0.1)
    os.close(into)
    return out


def private(megabytes: int):
    area = Area(megabytes * MIB)
    yield from itertools.repeat(area.check)


def locked(megabytes: int):
    """Memory that is locked: the kernel has all its pages there from the start, at a restore too."""
    area = Area(megabytes * MIB)
    start = ctypes.addressof(ctypes.c_char.from_buffer(area.area))
    assert LIBC.mlock(ctypes.c_void_p(start), ctypes.c_size_t(megabytes * MIB)) == 0
    yield from itertools.repeat(area.check)


def tree(megabytes: int):
    """Parent and child share one area copy-on-write, each has one of its own."""
    common = Area(megabytes * MIB)
    common.area.madvise(mmap.MADV_DONTDUMP)  # or the kernel joins it with the next one, and CRIU shares no more
    pipe = fork(common)
    own = Area(megabytes * MIB)

    def check() -> None:
        common.check()
        own.check()
        assert os.read(pipe, 1) == b".", "the child has ended"

    yield from itertools.repeat(check)


def shared(megabytes: int):
    """Shared anonymous memory and a memfd, used by parent and child, beside private memory."""
    size = megabytes * MIB
    file = os.memfd_create("gpuckpt-test")
    os.ftruncate(file, size)
    areas = [Area(size, mmap.mmap(-1, size)), Area(size, mmap.mmap(file, size)), Area(size)]
    pipe = fork(*areas[:2])

    def check() -> None:
        for area in areas:
            area.check()
        assert os.read(pipe, 1) == b".", "the child has ended"

    yield from itertools.repeat(check)


def every(megabytes: int):
    """Much private memory, and a little shared copy-on-write, shared anonymously and by a memfd, with a child."""
    size = 8 * MIB
    common = Area(size)
    common.area.madvise(mmap.MADV_DONTDUMP)  # as in tree
    file = os.memfd_create("gpuckpt-test")
    os.ftruncate(file, size)
    areas = [common, Area(size, mmap.mmap(-1, size)), Area(size, mmap.mmap(file, size))]
    pipe = fork(*areas)
    areas.append(Area(megabytes * MIB))

    def check() -> None:
        for area in areas:
            area.check()
        assert os.read(pipe, 1) == b".", "the child has ended"

    yield from itertools.repeat(check)


def large(megabytes: int):
    """Much memory, made quickly: every page has 1 KiB of noise, and no 4 MiB are like others."""
    block = b"".join(os.urandom(1024) + bytes(PAGE - 1024) for _ in range(1024))
    area = mmap.mmap(-1, megabytes * MIB, flags=PRIVATE)
    for at in range(0, len(area), len(block)):
        area[at : at + len(block)] = block
        area[at : at + 8] = at.to_bytes(8, "little")
    known = zlib.crc32(area)

    def check() -> None:
        assert zlib.crc32(area) == known, "memory is not what it was"

    yield from itertools.repeat(check)


def mappings(megabytes: int):
    """60,000 mappings of one page, readable and read-only in turn so that the kernel cannot join them."""
    area = Area(megabytes * MIB)
    pages = []
    for number in range(60_000):
        at = LIBC.mmap(None, PAGE, 3, PRIVATE, -1, 0)
        assert at not in (None, ctypes.c_void_p(-1).value), number
        ctypes.memset(at, number % 255 + 1, 64)
        if number % 2:
            LIBC.mprotect(ctypes.c_void_p(at), PAGE, 1)
        pages.append(at)

    def check() -> None:
        area.check()
        for number, at in enumerate(pages):
            assert ctypes.string_at(at, 64) == bytes([number % 255 + 1]) * 64, f"page {number}"

    yield from itertools.repeat(check)


def sparse(megabytes: int):
    """Terabytes of address space, of which a page or two is used here and there.

    One reservation is open, as allocators make them; one is closed (PROT_NONE), as CUDA makes them: parts of it
    are opened and used, and some of these closed again.
    """
    area = Area(megabytes * MIB)
    start = LIBC.mmap(None, 1 << 40, 3, PRIVATE | 0x4000, -1, 0)  # MAP_NORESERVE
    places = [start + (number << 28) + number * PAGE for number in range(4096)]
    for number, place in enumerate(places):
        ctypes.memset(place, number % 255 + 1, PAGE)
    closed = LIBC.mmap(None, 4 << 40, 0, PRIVATE | 0x4000, -1, 0)
    parts = [ctypes.c_void_p(closed + (number << 36) + number * PAGE) for number in range(60)]
    for number, part in enumerate(parts):
        LIBC.mprotect(part, 3 * PAGE, 3)
        ctypes.memset(part, number + 1, PAGE)
        LIBC.mprotect(part, 3 * PAGE, 3 if number % 2 else 0)

    def check() -> None:
        area.check()
        for number, part in enumerate(parts):
            LIBC.mprotect(part, 3 * PAGE, 3)
            assert ctypes.string_at(part, PAGE + 8) == bytes([number + 1]) * PAGE + bytes(8), f"part {number}"
            LIBC.mprotect(part, 3 * PAGE, 3 if number % 2 else 0)
        for number, place in enumerate(places):
            assert ctypes.string_at(place, PAGE) == bytes([number % 255 + 1]) * PAGE, f"page {number}"
            assert ctypes.string_at(place + 2 * PAGE, 8) == bytes(8), f"behind page {number}"

    yield from itertools.repeat(check)


def threads(megabytes: int):
    """Threads that keep data on large stacks and count."""
    area, counts = Area(megabytes * MIB), [0] * 40
    threading.stack_size(16 * MIB)

    def work(number: int) -> None:
        kept = ctypes.create_string_buffer(os.urandom(4 * MIB), 4 * MIB)
        total = zlib.crc32(kept)
        while zlib.crc32(kept) == total:
            counts[number] += 1
            time.sleep(0.2)  # forty of them without a pause would leave nothing of two cores

    for number in range(len(counts)):
        threading.Thread(target=work, args=(number,), daemon=True).start()
    before = list(counts)

    def check() -> None:
        nonlocal before
        area.check()
        while not all(now > then for now, then in zip(counts, before, strict=True)):
            time.sleep(0.02)  # a thread that does not run ends the count here
        before = list(counts)

    yield from itertools.repeat(check)


def signals(megabytes: int):
    """A signal every millisecond, taken by a thread whose whole stack is one large mapping."""
    area, seen = Area(megabytes * MIB), [0]
    signal.signal(signal.SIGALRM, lambda *_: seen.__setitem__(0, seen[0] + 1))
    threading.stack_size(64 * MIB)
    threading.Thread(target=lambda: [time.sleep(0.0001) for _ in itertools.count()], daemon=True).start()
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
    signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)

    def check() -> None:
        before = seen[0]
        area.check()
        while seen[0] == before:
            time.sleep(0.02)  # as long as no signal comes

    yield from itertools.repeat(check)


def stopped(megabytes: int):
    """A child that somebody has stopped."""
    area = Area(megabytes * MIB)
    child = os.fork()
    if child == 0:
        LIBC.prctl(1, signal.SIGKILL)
        own = Area(megabytes * MIB)
        os.kill(os.getpid(), signal.SIGSTOP)
        own.check()
        os._exit(7)
    os.waitpid(child, os.WUNTRACED)

    def check() -> None:
        area.check()
        found, status = os.waitpid(child, os.WNOHANG)
        assert found == 0 or os.waitstatus_to_exitcode(status) == 7, "the child is not what it was"
        if found:
            raise SystemExit(0)

    yield from itertools.repeat(check)


KINDS = {
    work.__name__: work
    for work in (private, locked, tree, shared, every, large, mappings, sparse, threads, signals, stopped)
}


def main() -> None:
    kind, log, megabytes = sys.argv[1], sys.argv[2], int((sys.argv[3:] or ["64"])[0])
    with open(log, "a", buffering=1) as out:
        try:
            for number, check in enumerate(KINDS[kind](megabytes)):
                check()
                out.write(f"{number}\n")
                time.sleep(0.1)  # reading it all without a pause would leave little of two cores to the test
        except SystemExit:
            out.write("DONE\n")
        except BaseException as error:
            out.write(f"BROKEN {error!r}\n")
            raise


if __name__ == "__main__":
    main()

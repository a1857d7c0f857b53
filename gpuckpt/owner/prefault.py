"""Making the memory that the driver copies a GPU's memory into, ahead of its copy.

The driver maps all the host memory that it needs at once and fills it with one thread, which meets a fault at every
page: the copy of 16 GiB took 8.8 s. With the pages made by 15 threads, in 0.8 s, it took 4.1 s (H200, 16 cores, driver
580.159.04, Linux 6.18, pages of 4 KiB; with transparent huge pages and nothing made ahead 5.8 s).

All threads but the driver's own are held meanwhile, so memory that comes to be mapped is the driver's. Nothing is
written (system/memory_io.py), nothing is left behind by whoever is killed here, and where it cannot work, or is not
worth it, the driver meets its faults itself.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
from typing import TYPE_CHECKING

from gpuckpt.system import memory_io, procfs

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from gpuckpt.owner.messages import CudaMember

LOOK_SECONDS = 0.005
LEAST_BYTES = 64 << 20
"""Smaller mappings are not the copy, or soon done."""
MOST_THREADS = 16
END_SECONDS = 5.0
"""A call under way is over in milliseconds, unless the kernel keeps it."""

Span = tuple[int, int]


@contextlib.contextmanager
def ahead_of_copies(members: Sequence[CudaMember]) -> Iterator[dict[int, list[Span]]]:
    """While this lasts, what the driver maps in these processes is made present; the application's threads are held.

    Yields what is afterwards, where nothing was raised, the memory that came: pid -> ranges, whole pages.
    """
    before = {member.id.pid: _writable_memory(member.id.pid) for member in members}
    found: dict[int, list[Span]] = {}
    with _making(members):
        yield found
    for pid, others in before.items():
        found[pid] = [span for span in without(_writable_memory(pid), others) if span[1] - span[0] >= LEAST_BYTES]


@contextlib.contextmanager
def _making(members: Sequence[CudaMember]) -> Iterator[None]:
    """Not for a process whose GPU memory is unknown: the copy is told from a reservation by its size."""
    known = [member for member in members if member.memory_bytes]
    threads = min(MOST_THREADS, len(os.sched_getaffinity(0)) - len(members))  # each copy keeps a core busy
    if not known or threads < 1:
        yield
        return
    over = threading.Event()
    copies = [_Copy(member.id.pid, sum(member.memory_bytes.values())) for member in known]
    followers = _started([threading.Thread(target=_follow, args=(copies, threads, over), daemon=True)])
    try:
        yield
    finally:
        over.set()
        for follower in followers:
            follower.join(END_SECONDS)


class _Copy:
    """What the driver has mapped in one process since the copy began, up to the size of its GPU memory."""

    def __init__(self, pid: int, most_bytes: int) -> None:
        self._pid = pid
        self._left = most_bytes + most_bytes // 16  # the driver's own tables come along
        self._seen = _writable_memory(pid)

    def pieces(self) -> list[tuple[int, int, int]]:
        """What has come since the last time: (pid, address, bytes) of single calls."""
        now = _writable_memory(self._pid)
        fresh = [span for span in without(now, self._seen) if span[1] - span[0] >= LEAST_BYTES]
        self._seen = now
        found: list[tuple[int, int, int]] = []
        for start, end in fresh:
            size = min(end - start, self._left)
            self._left -= size
            found.extend((self._pid, *piece) for piece in cut(start, start + size))
        return found


def _writable_memory(pid: int) -> list[Span]:
    """The private anonymous memory of a process that it may write to; ascending, empty when it has ended."""
    return [
        (mapping.start, mapping.end)
        for mapping in procfs.maps_of(pid)
        if mapping.perms in ("rw-p", "rwxp") and (not mapping.path or mapping.path.startswith("[anon:"))
    ]


def without(spans: Sequence[Span], others: Sequence[Span]) -> Iterator[Span]:
    """What of these spans lies in none of the others; both ascending and without overlaps."""
    first = 0
    for start, end in spans:
        while first < len(others) and others[first][1] <= start:
            first += 1
        free = start
        for there, until in itertools.islice(others, first, None):
            if there >= end:
                break
            if free < there:
                yield free, there
            free = max(free, until)
        if free < end:
            yield free, end


def cut(start: int, end: int) -> Iterator[tuple[int, int]]:
    """(address, bytes) of calls, at round addresses: a huge page is then made by one of them."""
    while start < end:
        until = min(end, (start // memory_io.PREFAULT_BYTES + 1) * memory_io.PREFAULT_BYTES)
        yield start, until - start
        start = until


def _started(threads: Sequence[threading.Thread]) -> list[threading.Thread]:
    """Those that could be started: a limit on tasks is no reason to fail."""
    started = []
    with contextlib.suppress(RuntimeError):
        for thread in threads:
            thread.start()
            started.append(thread)
    return started


def _follow(copies: Sequence[_Copy], threads: int, over: threading.Event) -> None:
    looking = 0.0
    while not over.wait(max(LOOK_SECONDS, looking)):  # a process can have 65,530 mappings
        began = time.monotonic()
        by_process = [copy.pieces() for copy in copies]
        looking = time.monotonic() - began
        in_turn = (piece for turn in itertools.zip_longest(*by_process) for piece in turn if piece is not None)
        if any(by_process):
            _make(in_turn, threads, over)


def _make(pieces: Iterable[tuple[int, int, int]], threads: int, over: threading.Event) -> None:
    rest, lock = iter(pieces), threading.Lock()

    def work() -> None:
        while not over.is_set():
            with lock:
                piece = next(rest, None)
            if piece is None:
                return
            with contextlib.suppress(OSError):  # it has ended, or it is not to be had: the driver goes on by itself
                memory_io.prefault(*piece)

    for worker in _started([threading.Thread(target=work, daemon=True) for _ in range(threads)]):
        worker.join()

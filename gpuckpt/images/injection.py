"""Writing the memory of an image into the held processes of a restored tree, from many threads.

Each thread reads a frame into its one buffer, verified, and writes what of it belongs to which address:
no second copy of the memory anywhere. The processes must stand still; nothing they contain has run.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TYPE_CHECKING

from gpuckpt.images import lean
from gpuckpt.images.packindex import ZERO
from gpuckpt.system.memory_io import Writer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from gpuckpt.images.memory import MemoryPlan, ProcessMemory
    from gpuckpt.images.packindex import Frame
    from gpuckpt.images.packs import PackReader

STEP_SECONDS = 0.05


class Injection:
    """One plan being carried out."""

    def __init__(self, plan: MemoryPlan, files: Mapping[str, tuple[Frame, ...]], reader: PackReader) -> None:
        self._work = _work(plan, files)
        self._reader = reader
        self._turn = threading.Lock()
        self._stop = threading.Event()

    def run(self, going_on: Callable[[], None] = lambda: None) -> None:
        """Write it all. When this returns or raises, no thread writes any more.

        `going_on` is called every STEP_SECONDS and may raise. Raises ImageCorrupt for a frame that is
        damaged, OSError where the memory cannot be written to (ProcessLookupError: the process has ended).
        """
        count = lean.workers()
        with ThreadPoolExecutor(count) as pool:
            jobs = {pool.submit(self._carry_out) for _ in range(count)}
            try:
                while jobs:
                    done, jobs = wait(jobs, STEP_SECONDS, return_when="FIRST_COMPLETED")
                    for job in done:
                        job.result()
                    going_on()
            finally:
                self._stop.set()

    def _carry_out(self) -> None:
        """One thread: a frame at a time, until none is left."""
        buffer = lean.frame_buffer()
        writer = Writer(buffer)
        while not self._stop.is_set():
            with self._turn:
                work = next(self._work, None)
            if work is None:
                return
            memory, frame = work
            self._reader.read(frame, buffer)
            # Nothing is written of a zero frame: fresh memory is zero, and takes no room until it is used.
            if frame.pack != ZERO:
                writer.write(memory.pid, list(memory.split.injected.within(frame.offset, frame.raw)))


def _work(plan: MemoryPlan, files: Mapping[str, tuple[Frame, ...]]) -> Iterator[tuple[ProcessMemory, Frame]]:
    """The frames that hold anything to inject. The threads take turns, so that equal ones get equal work."""
    for memory in plan.processes:
        for frame in files[memory.pages]:
            if any(True for _ in memory.split.injected.within(frame.offset, frame.raw)):
                yield memory, frame

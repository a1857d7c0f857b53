"""The pages files that CRIU reads, made from packs: only what is not injected, or all of it."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpuckpt.images.packindex import FRAME_BYTES, ZERO
from gpuckpt.images.packs import page_aligned

if TYPE_CHECKING:
    import mmap
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from gpuckpt.images.memory import MemoryPlan, Range
    from gpuckpt.images.packindex import Frame
    from gpuckpt.images.packs import PackReader

MAX_WORKERS = 16


def workers() -> int:
    """Threads for reading frames: one a core that we may use, at most MAX_WORKERS (8 MiB of buffers each)."""
    return min(len(os.sched_getaffinity(0)), MAX_WORKERS)


@dataclass(frozen=True, slots=True)
class PagesFile:
    """A pages file to be written: which parts of the whole one, in order, (offset, length)."""

    name: str
    frames: tuple[Frame, ...]
    parts: tuple[Range, ...]

    @property
    def size(self) -> int:
        """Its bytes."""
        return sum(length for _, length in self.parts)


def pages_files(files: Mapping[str, tuple[Frame, ...]], plan: MemoryPlan | None) -> tuple[PagesFile, ...]:
    """The pages files of an image without what the plan injects."""
    kept = {one.pages: one.split.kept for one in plan.processes} if plan is not None else {}
    return tuple(PagesFile(name, frames, kept.get(name, _whole(frames))) for name, frames in files.items())


def _whole(frames: Sequence[Frame]) -> tuple[Range, ...]:
    return ((0, frames[-1].offset + frames[-1].raw),) if frames else ()


def write(
    directory: Path, files: Sequence[PagesFile], reader: PackReader, going_on: Callable[[], None] = lambda: None
) -> None:
    """Write the pages files from verified frames, with several threads.

    `going_on` is called now and then and may raise. Raises ImageCorrupt, OSError.
    """
    stop = threading.Event()
    with ThreadPoolExecutor(workers()) as pool:
        jobs = []
        for file in files:
            path = directory / file.name
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
            os.truncate(path, file.size)
            jobs += [pool.submit(_write_frame, path, *work, reader, stop) for work in _by_frame(file)]
        try:
            for job in jobs:
                going_on()
                job.result()
        finally:
            stop.set()


def _by_frame(file: PagesFile) -> Iterator[tuple[Frame, list[tuple[int, int, int]]]]:
    """Each frame that is needed with what of it goes where: (offset in the frame, length, offset in the new file)."""
    parts, number, at = file.parts, 0, 0
    for frame in file.frames:
        end = frame.offset + frame.raw
        wanted = []
        while number < len(parts) and parts[number][0] < end:
            start, length = parts[number]
            first, last = max(start, frame.offset), min(start + length, end)
            wanted.append((first - frame.offset, last - first, at))
            at += last - first
            if start + length > end:
                break
            number += 1
        if wanted:
            yield frame, wanted


_own = threading.local()


def frame_buffer() -> mmap.mmap:
    """This thread's buffer for the raw bytes of one frame."""
    if not hasattr(_own, "buffer"):
        _own.buffer = page_aligned(FRAME_BYTES)
    buffer: mmap.mmap = _own.buffer
    return buffer


def _write_frame(
    path: Path, frame: Frame, wanted: list[tuple[int, int, int]], reader: PackReader, stop: threading.Event
) -> None:
    if stop.is_set():
        return
    raw = reader.read(frame, frame_buffer())
    if frame.pack == ZERO:
        return  # a hole
    descriptor = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        for offset, length, at in wanted:
            done = 0
            while done < length:
                done += os.pwrite(descriptor, raw[offset + done : offset + length], at + done)
    finally:
        os.close(descriptor)

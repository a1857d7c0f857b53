"""The pages files that CRIU reads, made from packs: only what is not injected, or all of it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from gpuckpt.images.framesource import carry_out
from gpuckpt.model.records import dataclass

if TYPE_CHECKING:
    import mmap
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from gpuckpt.images.framesource import FrameSource
    from gpuckpt.images.memory import MemoryPlan, Range
    from gpuckpt.images.packindex import Frame


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


Wanted = tuple["Path", list[tuple[int, int, int]]]
"""The file that a frame goes to, and what of the frame goes where: (offset in the frame, length, offset there)."""


def write(
    directory: Path, files: Sequence[PagesFile], source: FrameSource, going_on: Callable[[], None] = lambda: None
) -> None:
    """Write the pages files from verified frames, with several threads.

    `going_on` is called now and then and may raise. Raises ImageCorrupt, OSError, and what the source raises.
    """
    for file in files:
        path = directory / file.name
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        # Frames that are all zero are holes.
        os.truncate(path, file.size)
    works = ((frame, (directory / file.name, wanted)) for file in files for frame, wanted in _by_frame(file))
    carry_out(source, works, sum(file.size for file in files), _writing, going_on)


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


def _writing(buffer: mmap.mmap) -> Callable[[Frame, Wanted], None]:
    raw = memoryview(buffer)

    def write_frame(_frame: Frame, work: Wanted) -> None:
        path, wanted = work
        descriptor = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            for offset, length, at in wanted:
                done = 0
                while done < length:
                    done += os.pwrite(descriptor, raw[offset + done : offset + length], at + done)
        finally:
            os.close(descriptor)

    return write_frame

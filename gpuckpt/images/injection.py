"""Writing the memory of an image into the held processes of a restored tree, from many threads.

Each thread gets a frame into its one buffer, verified, and writes what of it belongs to which address:
no second copy of the memory anywhere. The processes must stand still; nothing they contain has run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpuckpt.images.framesource import carry_out
from gpuckpt.system.memory_io import Writer

if TYPE_CHECKING:
    import mmap
    from collections.abc import Callable, Iterator, Mapping

    from gpuckpt.images.framesource import FrameSource
    from gpuckpt.images.memory import MemoryPlan, ProcessMemory
    from gpuckpt.images.packindex import Frame


def inject(
    plan: MemoryPlan,
    files: Mapping[str, tuple[Frame, ...]],
    source: FrameSource,
    going_on: Callable[[], None] = lambda: None,
) -> None:
    """Write it all. When this returns or raises, no thread writes any more.

    `going_on` is called every now and then and may raise. Raises ImageCorrupt for a frame that is
    damaged, OSError where the memory cannot be written to (ProcessLookupError: the process has ended),
    and what else the source raises.
    """
    carry_out(source, _works(plan, files), plan.bytes_injected, _writing, going_on)


def _writing(buffer: mmap.mmap) -> Callable[[Frame, ProcessMemory], None]:
    writer = Writer(buffer)

    def write(frame: Frame, memory: ProcessMemory) -> None:
        writer.write(memory.pid, list(memory.split.injected.within(frame.offset, frame.raw)))

    return write


def _works(plan: MemoryPlan, files: Mapping[str, tuple[Frame, ...]]) -> Iterator[tuple[Frame, ProcessMemory]]:
    """The frames that hold anything to inject. Fresh memory is zero: nothing is written of a zero frame."""
    for memory in plan.processes:
        for frame in files[memory.pages]:
            if any(True for _ in memory.split.injected.within(frame.offset, frame.raw)):
                yield frame, memory

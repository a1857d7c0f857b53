"""Writing the memory of an image into the held processes of a restored tree, from many threads.

Each thread gets a frame into its one buffer, verified, and writes what of it belongs to which address:
no second copy of the memory anywhere. The processes must stand still; nothing they contain has run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpuckpt.images.filling import Filler
from gpuckpt.images.framesource import carry_out

if TYPE_CHECKING:
    import mmap
    from collections.abc import Callable, Iterator, Mapping

    from gpuckpt.images.filling import Door
    from gpuckpt.images.framesource import FrameSource
    from gpuckpt.images.memory import MemoryPlan, ProcessMemory
    from gpuckpt.images.packindex import Frame


def inject(
    plan: MemoryPlan,
    files: Mapping[str, tuple[Frame, ...]],
    source: FrameSource,
    going_on: Callable[[], None] = lambda: None,
    doors: Mapping[int, Door] | None = None,
) -> int:
    """Write it all. When this returns or raises, no thread writes any more.

    `doors` are ways into fresh memory, by pid; they stay the caller's. Returns how many bytes went through them.
    `going_on` is called every now and then and may raise. Raises ImageCorrupt for a frame that is
    damaged, OSError where the memory cannot be written to (ProcessLookupError: the process has ended),
    and what else the source raises.
    """
    fillers: list[Filler] = []

    def acting(buffer: mmap.mmap) -> Callable[[Frame, ProcessMemory], None]:
        filler = Filler(buffer, doors or {})
        fillers.append(filler)

        def write(frame: Frame, memory: ProcessMemory) -> None:
            filler.write(memory.pid, list(memory.split.injected.within(frame.offset, frame.raw)))

        return write

    carry_out(source, _works(plan, files), plan.bytes_injected, acting, going_on)
    return sum(filler.filled for filler in fillers)


def _works(plan: MemoryPlan, files: Mapping[str, tuple[Frame, ...]]) -> Iterator[tuple[Frame, ProcessMemory]]:
    """The frames that hold anything to inject. Fresh memory is zero: nothing is written of a zero frame."""
    for memory in plan.processes:
        for frame in files[memory.pages]:
            if any(True for _ in memory.split.injected.within(frame.offset, frame.raw)):
                yield frame, memory

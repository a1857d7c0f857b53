"""Where the frames of an image come from, and how many threads work on them at once.

They lie in its packs on this host (images/packs.py), or on another one (flows/farframes.py): whoever fills
memory or files with them sees no difference.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from gpuckpt.images.packindex import FRAME_BYTES, ZERO
from gpuckpt.images.packs import page_aligned

if TYPE_CHECKING:
    import mmap
    from collections.abc import Callable, Iterable, Iterator

    from gpuckpt.images.packindex import Frame, Index

STEP_SECONDS = 0.05
Work = TypeVar("Work")


class FrameSource(Protocol):
    """Hands out frames, verified, to any number of threads."""

    def threads(self, size: int) -> int:
        """How many shall be fed at once, for raw bytes of `size` together."""

    def read(self, frame: Frame) -> memoryview:
        """The raw bytes of one frame, until this thread's next read. Raises ImageCorrupt, GpuckptError."""

    def stream(self, wanted: Iterator[tuple[Frame, Work]], buffer: mmap.mmap) -> Iterator[tuple[Frame, Work]]:
        """Each of the wanted frames in turn, with what goes with it; its raw bytes are then in `buffer`.

        Frames of which nothing is stored must not be among them. What is wanted is taken ahead of what is
        handed out. Raises ImageCorrupt for a frame that is damaged, GpuckptError.
        """

    def verify_zero(self, frame: Frame) -> None:
        """Compare the digest of a frame of which nothing is stored. Raises ImageCorrupt."""

    def cut(self) -> None:
        """Nothing more is wanted: every `stream` of another thread ends soon, by whatever exception."""

    def close(self) -> None:
        """Let it go."""


def carry_out(
    source: FrameSource,
    works: Iterable[tuple[Frame, Work]],
    size: int,
    acting: Callable[[mmap.mmap], Callable[[Frame, Work], None]],
    going_on: Callable[[], None],
) -> None:
    """Do for each frame what goes with it, with as many threads as the source can feed; `size` is of all together.

    `acting` is called once in each thread, with its buffer, for what is done there with each frame whose raw
    bytes have come into that buffer. Frames of which nothing is stored are only verified: whatever they would
    be written to is zero. `going_on` is called every STEP_SECONDS and may raise. When this returns or raises,
    no thread acts any more. Raises what source, act and `going_on` raise.
    """
    feed = _Feed(source, works)

    def one_thread() -> None:
        buffer = page_aligned(FRAME_BYTES)
        act = acting(buffer)
        for frame, work in source.stream(iter(feed), buffer):
            if feed.over.is_set():
                return
            act(frame, work)

    from concurrent.futures import ThreadPoolExecutor, wait  # noqa: PLC0415  most commands read no frames

    count = source.threads(size)
    with ThreadPoolExecutor(count) as pool:
        jobs = {pool.submit(one_thread) for _ in range(count)}
        try:
            while jobs:
                done, jobs = wait(jobs, STEP_SECONDS, return_when="FIRST_COMPLETED")
                for job in done:
                    job.result()
                going_on()
        except BaseException:
            feed.over.set()
            source.cut()
            raise


def verify_all(source: FrameSource, index: Index, going_on: Callable[[], None] = lambda: None) -> None:
    """Read every frame once. Raises ImageCorrupt, and what source and `going_on` raise."""
    frames = {
        (frame.pack, frame.at, frame.raw, frame.digest): frame for found in index.files.values() for frame in found
    }
    nothing = ((frame, None) for frame in frames.values())
    carry_out(source, nothing, index.raw_bytes(), lambda _buffer: lambda _frame, _work: None, going_on)


class _Feed(Generic[Work]):
    """What is to be done. The threads take turns, so that equal ones get equal work."""

    def __init__(self, source: FrameSource, works: Iterable[tuple[Frame, Work]]) -> None:
        self._source = source
        self._works = iter(works)
        self._turn = threading.Lock()
        self.over = threading.Event()

    def __iter__(self) -> Iterator[tuple[Frame, Work]]:
        while not self.over.is_set():
            with self._turn:
                found = next(self._works, None)
            if found is None:
                return
            if found[0].pack == ZERO:
                self._source.verify_zero(found[0])
            else:
                yield found

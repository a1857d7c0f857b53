"""The pages files that CRIU has open during a capture: workers take turns at cutting frames off them.

Whose turn it is waits until a file has something and moves (splices, no copy) a frame of it into a pipe of
its own; what it then does with the frame, others need not wait for. CRIU writes one pages file after the
other. Should it ever write two at once, the one whose turn it is never waits at one while the other has
something: it cuts its frame short, which costs sharing between images, nothing else.

The alternative, a thread that moves and hands over to idle workers, was 8 % slower on 16 cores: two more
switches between threads for each frame, all under one interpreter lock.
"""

from __future__ import annotations

import os
import select
import threading
from collections import deque
from typing import TYPE_CHECKING

from gpuckpt.images import streaming
from gpuckpt.model.records import dataclass

if TYPE_CHECKING:
    from collections.abc import Callable

    from gpuckpt.images.captureworker import Pages, Worker
    from gpuckpt.images.cuts import Cuts


@dataclass(slots=True)
class Source:
    """An open pages file."""

    pages: Pages
    pipe: int
    find_cuts: Callable[[], Cuts | None]
    """Asked once, when the first bytes are there: the process stands still by then."""
    offset: int = 0
    begun: bool = False


@dataclass(frozen=True, slots=True)
class Taken:
    """A frame that lies in a worker's pipe, or partly in its buffer already."""

    source: Source
    offset: int
    length: int


class Intake:
    """All open pages files. `add` and `over` come from the reader of the capture, `take` from the workers."""

    def __init__(self, stop: streaming.Stop, ended: Callable[[Source], None]) -> None:
        """`ended` is called, by the worker whose turn it is, when a file is at its end."""
        self._stop = stop
        self._ended = ended
        self._turn = threading.Lock()
        self._fresh: deque[Source] = deque()
        self._news = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._over = False
        self._open: dict[int, Source] = {}
        """By pipe, in the order in which CRIU opened them. This and what follows belongs to whose turn it is."""
        self._poll = select.poll()
        for descriptor in (stop.fileno(), self._news):
            self._poll.register(descriptor, select.POLLIN)

    def add(self, source: Source) -> None:
        """CRIU has opened a pages file."""
        self._fresh.append(source)
        os.eventfd_write(self._news, 1)

    def over(self) -> None:
        """No other file will come: workers that find nothing to do end."""
        self._over = True
        os.eventfd_write(self._news, 1)

    def close(self) -> None:
        """No worker is left."""
        os.close(self._news)

    def take(self, worker: Worker, begun: Callable[[], None]) -> Taken | None:
        """The next frame, `begun` called before it can be missed; None at the end, or when all shall stop.

        Raises OSError.
        """
        with self._turn:
            while (source := self._ready()) is not None:
                offset = source.offset
                length = self._fill(worker, source)
                if length:
                    begun()
                if source.offset < 0:
                    self._leave(source)
                if length:
                    return Taken(source, offset, length)
        return None

    def _fill(self, worker: Worker, source: Source) -> int:
        """Move one frame; how many bytes it has. The source's offset is below 0 at the end of the file."""
        if not source.begun:
            source.begun = True
            source.pages.cuts = source.find_cuts() or source.pages.cuts
        wanted = source.pages.cuts.end_of(source.offset) - source.offset
        filled = 0
        while filled < wanted:
            try:
                moved = streaming.splice(source.pipe, worker.target, wanted - filled)
            except BlockingIOError:
                if self._is_ready(source):
                    worker.drain(filled)  # so it is its pipe that is full
                elif self._ready(source) is not source:
                    break
                continue
            if moved == 0:
                source.offset = -1
                return filled
            filled += moved
        source.offset += filled
        return filled

    def _leave(self, source: Source) -> None:
        self._poll.unregister(source.pipe)
        del self._open[source.pipe]
        self._ended(source)

    def _ready(self, preferred: Source | None = None) -> Source | None:
        """Wait for a file that has something or has ended; None when none will come, or all shall stop."""
        while not self._stop.is_raised() and (self._open or self._fresh or not self._over):
            ready = {descriptor for descriptor, _ in self._poll.poll()}
            if preferred is not None and preferred.pipe in ready:
                return preferred
            if self._news in ready:
                self._welcome()
            for pipe, source in self._open.items():
                if pipe in ready:
                    return source
        return None

    def _is_ready(self, source: Source) -> bool:
        return any(descriptor == source.pipe for descriptor, _ in self._poll.poll(0))

    def _welcome(self) -> None:
        os.eventfd_read(self._news)
        while self._fresh:
            source = self._fresh.popleft()
            self._open[source.pipe] = source
            self._poll.register(source.pipe, select.POLLIN)

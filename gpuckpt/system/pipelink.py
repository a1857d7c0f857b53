"""The link of a program that ssh or sshd has started: its stdin and stdout, pipes as a rule."""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import socket
import stat
import time
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from gpuckpt.system.extents import Extent, pass_on
from gpuckpt.system.links import MOST_AT_ONCE, STALL_SECONDS, Progress, SocketLink, in_words, some

if TYPE_CHECKING:
    from collections.abc import Callable

    from gpuckpt.system.links import Link

T = TypeVar("T")

PIPE_BYTES = 1 << 20
"""What everybody may have (/proc/sys/fs/pipe-max-size). sshd gives its programs pipes of 64 KiB."""


NAP_SECONDS, NAP_BYTES = 0.0004, 256 << 10
"""sshd fills and empties a pipe by 32 KiB. Where more than NAP_BYTES are to move we let some of these pass before we
look again instead of waking up for each, a third of the CPU of a transfer: PIPE_BYTES last longer up to 2.5 GB/s."""


class PipeLink:
    """A link over two descriptors, as a program has them that sshd started."""

    def __init__(self, source: int, sink: int, stall_seconds: float = STALL_SECONDS) -> None:
        self._source, self._sink = source, sink
        self._stall_seconds = stall_seconds
        self._received = Progress(stall_seconds)
        # A pipe takes a part of what is written only where it may not block. Both may be the two ways of one socket.
        for descriptor in (source, sink):
            os.set_blocking(descriptor, False)
        self._roomy = [descriptor for descriptor in (source, sink) if _enlarged(descriptor)]

    def _wait(self, descriptor: int, what: int) -> float:
        """Returns for how many seconds. Raises TimeoutError."""
        begun = time.monotonic()
        waiting = select.poll()
        waiting.register(descriptor, what)
        if not waiting.poll(int(self._stall_seconds * 1000)):
            raise TimeoutError
        return time.monotonic() - begun

    def _waited(self, descriptor: int, what: int, act: Callable[[], T], more: int = 0) -> tuple[T, float]:
        """What `act` gives once it can, and for how many seconds it could not; `more` bytes are to move.

        Raises TimeoutError.
        """
        waited = 0.0
        while True:
            # Tried first: while much is on its way nothing has to be waited for.
            with contextlib.suppress(BlockingIOError):
                return act(), waited
            waited += self._wait(descriptor, what)
            if more > NAP_BYTES and descriptor in self._roomy:
                time.sleep(NAP_SECONDS)

    def send(self, *parts: bytes | memoryview | Extent) -> None:
        """Send all bytes of all parts."""
        with in_words():
            for part in parts:
                if isinstance(part, Extent):
                    pass_on(part, MOST_AT_ONCE, self._splice, self._send_some)
                    continue
                rest = memoryview(part)
                while rest:
                    rest = rest[self._send_some(rest) :]

    def _send_some(self, content: memoryview) -> int:
        return self._waited(self._sink, select.POLLOUT, lambda: os.write(self._sink, content[:MOST_AT_ONCE]))[0]

    def _splice(self, descriptor: int, offset: int, count: int) -> int:
        def once() -> int:
            return os.splice(descriptor, self._sink, count, offset_src=offset, flags=os.SPLICE_F_NONBLOCK)

        return self._waited(self._sink, select.POLLOUT, once, count)[0]

    def receive_into(self, view: memoryview) -> None:
        """Fill the view."""
        progress = Progress(self._stall_seconds)
        with in_words():
            while view:
                read = partial(os.readv, self._source, [view])
                got, waited = self._waited(self._source, select.POLLIN, read, len(view))
                view = view[some(got) :]
                if view:
                    progress.moved(got, waited)

    def receive(self, limit: int) -> bytes:
        """Between 1 and `limit` bytes."""
        with in_words():
            content, waited = self._waited(self._source, select.POLLIN, lambda: os.read(self._source, limit))
            self._received.moved(some(len(content)), waited)
            return content

    def whole(self) -> None:
        """What `receive` gave is whole."""
        self._received = Progress(self._stall_seconds)

    def has_ended(self) -> bool:
        """Whether the other side has closed it: nothing is left to read, and nothing will come."""
        waiting = select.poll()
        waiting.register(self._source, select.POLLIN)
        seen = dict(waiting.poll(0)).get(self._source, 0)
        return bool(seen & (select.POLLHUP | select.POLLERR | select.POLLNVAL)) and not seen & select.POLLIN

    def close(self) -> None:
        """End it; the descriptors belong to whoever opened them."""


def link_of_program(source: int, sink: int) -> Link:
    """The link of a program whose stdin and stdout these are: with sshd both are one socket."""
    ends = [os.fstat(descriptor) for descriptor in (source, sink)]
    if stat.S_ISSOCK(ends[0].st_mode) and os.path.samestat(*ends):
        return SocketLink(socket.socket(fileno=os.dup(source)))
    return PipeLink(source, sink)


def _enlarged(pipe: int) -> bool:
    try:
        return fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, PIPE_BYTES) >= PIPE_BYTES
    except OSError:
        return False

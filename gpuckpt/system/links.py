"""A two-way stream of bytes to another process, with a limit on every wait.

A side that takes or gives no byte for `stall_seconds` counts as lost: a dead link shows no error for hours. So does one
that has begun with something and then gives next to nothing of it: a byte a minute would hold us for ever. (Who takes
a byte a minute is silent as it is: what is sent becomes room for more only in whole buffers.)
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
import time
from typing import TYPE_CHECKING, Protocol, TypeVar

from gpuckpt.system.extents import Extent, pass_on

if TYPE_CHECKING:
    from collections.abc import Iterator

T = TypeVar("T")

STALL_SECONDS = 60.0
"""The longest silence. Whoever works longer says so in between."""

SLOWEST = 64.0
"""Bytes per second below which a side is as good as silent. A 56 kbit/s line that eight connections share gives each of
them ten times as much."""

MOST_AT_ONCE = 1 << 20

SMALL_BYTES = 4 << 10
"""A greeting is read byte by byte, while other connections carry data at full pace."""


class LinkLost(Exception):
    """The other side has gone, or is silent for too long."""


class Silent(LinkLost):
    """The other side gave or took no byte for the longest time."""


class Link(Protocol):
    """What frames and SFTP need of a connection."""

    def send(self, *parts: bytes | memoryview | Extent) -> None:
        """Send all bytes of all parts. Raises LinkLost."""

    def receive_into(self, view: memoryview) -> None:
        """Fill the view. Raises LinkLost, also when the stream ends before."""

    def receive(self, limit: int) -> bytes:
        """Between 1 and `limit` bytes. Raises LinkLost at the end of the stream."""

    def whole(self) -> None:
        """What `receive` gave is whole: before what comes next the other side may be silent again."""

    def has_ended(self) -> bool:
        """Whether the other side has closed it, as far as is known. Takes nothing and does not wait."""

    def close(self) -> None:
        """End it, from any thread; what waits in it raises LinkLost."""


class Pace:
    """Bytes per second, over all links that share it and both directions."""

    def __init__(self, bytes_per_second: float) -> None:
        # Some twenty portions a second: fewer are bursts, many more are nothing but sleeping.
        self.slice_bytes = int(min(MOST_AT_ONCE, max(16 << 10, bytes_per_second / 20)))
        self._rate = bytes_per_second
        self._free_at = 0.0
        self._lock = threading.Lock()

    def spend(self, count: int) -> None:
        """Wait until `count` bytes may travel; a few are counted and need not wait."""
        with self._lock:
            now = time.monotonic()
            begin = max(now, self._free_at)
            self._free_at = begin + count / self._rate
        if count > SMALL_BYTES:
            time.sleep(begin - now)


class Progress:
    """Of one thing that is under way. Until its first byte only silence counts; only time that was waited counts."""

    def __init__(self, stall_seconds: float) -> None:
        self._stall_seconds = stall_seconds
        self._begun = False
        self._bytes, self._seconds = 0, 0.0

    def moved(self, count: int, seconds: float) -> None:
        """So many bytes after so long a wait, and more are to come. Raises Silent."""
        if not self._begun:
            self._begun = True
            return
        self._bytes += count
        self._seconds += seconds
        if self._seconds < self._stall_seconds:
            return
        if self._bytes < SLOWEST * self._seconds:
            raise Silent(f"the other side is as good as silent: {self._bytes} bytes in {self._seconds:.1f} s")
        self._bytes, self._seconds = 0, 0.0


class SocketLink:
    """A link over a connected stream socket. Once lost it stays so."""

    def __init__(
        self,
        sock: socket.socket,
        stall_seconds: float = STALL_SECONDS,
        pace: Pace | None = None,
        *,
        polled: bool = False,
    ) -> None:
        """`polled`: silence is no loss, whoever reads looks again."""
        self._socket = sock
        self._pace = pace
        self._polled = polled
        self._stall_seconds = stall_seconds
        self._received = Progress(stall_seconds)
        self._slice = MOST_AT_ONCE if pace is None else pace.slice_bytes
        # The kernel's own limits: it then waits for a whole piece by itself; Python would wake up for each 32 KiB.
        sock.setblocking(True)  # noqa: FBT003 - its signature
        limit = struct.pack("@ll", int(stall_seconds), int(stall_seconds % 1 * 1_000_000))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)

    def send(self, *parts: bytes | memoryview | Extent) -> None:
        """Send all bytes of all parts."""
        with self._closed_when_lost():
            for part in parts:
                if isinstance(part, Extent):
                    pass_on(part, self._slice, self._splice, self._send_some)
                    continue
                rest = memoryview(part)
                while rest:
                    rest = rest[self._send_some(rest) :]

    def _send_some(self, content: memoryview) -> int:
        # Not sendall: its limit would be for all bytes together.
        sent = self._socket.send(content[: self._slice])
        self._spend(sent)
        return sent

    def _splice(self, descriptor: int, offset: int, count: int) -> int:
        sent = os.sendfile(self._socket.fileno(), descriptor, offset, count)
        self._spend(sent)
        return sent

    def receive_into(self, view: memoryview) -> None:
        """Fill the view."""
        progress = Progress(self._stall_seconds)
        with self._closed_when_lost():
            while view:
                begun = time.monotonic()
                got = some(self._socket.recv_into(view[: self._slice], 0, socket.MSG_WAITALL))
                view = view[got:]
                if view:
                    progress.moved(got, time.monotonic() - begun)
                self._spend(got)

    def receive(self, limit: int) -> bytes:
        """Between 1 and `limit` bytes."""
        with self._closed_when_lost():
            begun = time.monotonic()
            content = self._socket.recv(min(limit, self._slice))
            if not self._polled:
                self._received.moved(some(len(content)), time.monotonic() - begun)
            self._spend(some(len(content)))
            return content

    def whole(self) -> None:
        """What `receive` gave is whole."""
        self._received = Progress(self._stall_seconds)

    def has_ended(self) -> bool:
        """Whether the other side has closed it."""
        try:
            return not self._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True

    @contextlib.contextmanager
    def _closed_when_lost(self) -> Iterator[None]:
        try:
            with in_words():
                yield
        except LinkLost as lost:
            if not (self._polled and isinstance(lost, Silent)):
                self.close()
            raise

    def _spend(self, count: int) -> None:
        if self._pace is not None:
            self._pace.spend(count)

    def close(self) -> None:
        """End it."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def some(count: int) -> int:
    """A count of bytes that were read. Raises LinkLost for none: the stream has ended."""
    if count == 0:
        raise LinkLost("the other side has closed the connection")
    return count


@contextlib.contextmanager
def in_words() -> Iterator[None]:
    """What a stream says of its end, as LinkLost or Silent."""
    try:
        yield
    except (TimeoutError, BlockingIOError):
        raise Silent("the other side is silent") from None
    except (OSError, ValueError) as error:
        raise LinkLost(getattr(error, "strerror", None) or "the connection was closed") from None

"""The protocol of two gpuckpts without ssh: the far side is a thread of this process; the line can be cut at any byte."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from types import SimpleNamespace

from gpuckpt.stores.serving import Server
from gpuckpt.system.extents import Extent
from gpuckpt.system.links import LinkLost, SocketLink


def bytes_of(payload: bytes | memoryview | Extent) -> bytes:
    """What an answer of a serving gpuckpt has with it."""
    if isinstance(payload, Extent):
        return os.pread(payload.descriptor, payload.size, payload.offset)
    return bytes(payload)


class CutLink(SocketLink):
    """Breaks when its share of bytes is used up, in both directions together."""

    def __init__(self, sock: socket.socket, purse: list[int], stall_seconds: float) -> None:
        super().__init__(sock, stall_seconds)
        self._purse = purse
        self._slice = 4096

    def _spend(self, count: int) -> None:
        self._purse[0] -= count
        if self._purse[0] < 0:
            raise OSError(104, "cut")


class Line:
    """Calls a serving gpuckpt in a thread of this process."""

    def __init__(
        self, bytes_until_cut: int = 1 << 60, serve=lambda link: Server(link).run(), stall_seconds: float = 20.0
    ) -> None:
        self._stall_seconds = stall_seconds
        self.account = SimpleNamespace(host="far", may_ask=False)
        self.purse = [bytes_until_cut]
        self.servers: list[threading.Thread] = []
        self._serve = serve

    def run(self, _command, **_):
        ours, theirs = socket.socketpair()
        far = SocketLink(theirs, 20)

        def serve() -> None:
            with contextlib.suppress(LinkLost):
                self._serve(far)
            far.close()

        # Lanes call from several threads at once: each must start its own.
        server = threading.Thread(target=serve)
        server.start()
        self.servers.append(server)
        link = CutLink(ours, self.purse, self._stall_seconds)
        return SimpleNamespace(link=link, close=link.close, end=lambda: (None, ""))

    def ended(self) -> None:
        for server in self.servers:
            server.join()

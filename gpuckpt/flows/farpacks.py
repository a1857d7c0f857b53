"""Packs that grow on another host: a capture's workers send each frame on its way as soon as it is compressed.

Each pack has a connection of its own, opened before the tree stands still. What has arrived is named and compared
there when the pack is complete (stores/packlanding.py), and found by `begin` like what an earlier try has left.
"""

from __future__ import annotations

import contextlib
import threading
import time
from typing import TYPE_CHECKING

import blake3

from gpuckpt.images.packindex import PackFile
from gpuckpt.model.errors import GpuckptError, TransferFailed
from gpuckpt.stores.ssh import AHEAD
from gpuckpt.system.links import LinkLost

if TYPE_CHECKING:
    from gpuckpt.stores.ssh import Peer, SshStore

ALIVE_SECONDS = 10.0


class FarPack:
    """One pack: a PackSink. Its worker appends; others only keep the connection alive, or cut it."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer
        self._hasher = blake3.blake3()
        self._unconfirmed = 0
        self._talking = threading.Lock()
        self._last = time.monotonic()
        self.size = 0
        """Bytes sent so far."""

    def append(self, stored: memoryview | bytes) -> int:
        """Send a frame's stored bytes. Raises GpuckptError."""
        at = self.size
        with self._talking, self._told():
            self._peer.put({"do": "pack-write", "at": at}, stored)
            self._unconfirmed += 1
            self._confirm(AHEAD - 1)
        self._hasher.update(stored)
        self.size += len(stored)
        return at

    def sync(self) -> None:
        """Nobody waits for its disk: the job that comes of it would not outlive that host either."""

    def finish(self) -> PackFile | None:
        """All has arrived and was compared; None where nothing was sent. Raises GpuckptError."""
        if self.size == 0:
            self.discard()
            return None
        pack = PackFile(self._hasher.hexdigest(), self.size)
        with self._talking, self._told():
            self._confirm(0)
            self._peer.ask({"do": "pack-finish", "b3": pack.name, "size": pack.size})
        self.discard()
        return pack

    def discard(self) -> None:
        """End its connection, from any thread."""
        self._peer.close()

    def keep_alive(self) -> None:
        """To be called every second or so. Raises GpuckptError."""
        if time.monotonic() - self._last < ALIVE_SECONDS or not self._talking.acquire(blocking=False):
            return
        try:
            with self._told():
                self._confirm(0)
                self._peer.ask({"do": "ping"})
        finally:
            self._talking.release()

    def _confirm(self, most_open: int) -> None:
        while self._unconfirmed > most_open:
            self._peer.take()
            self._unconfirmed -= 1
        self._last = time.monotonic()

    def _told(self) -> contextlib.AbstractContextManager[None]:
        return _as_failure(self._peer.where)


@contextlib.contextmanager
def _as_failure(where: str):  # type: ignore[no-untyped-def]  # noqa: ANN202 - a generator of nothing
    try:
        yield
    except LinkLost as lost:
        raise TransferFailed(f"the connection to {where} was lost: {lost}", "repeat the command") from None


def _joined(peer: Peer, place: str, token: str) -> FarPack:
    try:
        peer.ask({"do": "pack-join", "path": place, "token": token})
    except BaseException:
        peer.close()
        raise
    return FarPack(peer)


class FarPacks:
    """All packs of one capture, below `place` on the other host."""

    def __init__(self, store: SshStore, place: str, count: int) -> None:
        """Make room there and connect up to `count` times. Raises GpuckptError where not even one comes."""
        self._packs: list[FarPack] = []
        with _as_failure(store.first.where):
            token = str(store.question({"do": "packs", "path": place}).header.get("token"))
            for number in range(count):
                try:
                    self._packs.append(_joined(store.another(), place, token))
                except (LinkLost, GpuckptError):
                    if number == 0:
                        raise
                    break  # that host limits its connections: the others carry all

    def open(self, number: int) -> FarPack:
        """The pack of a worker."""
        return self._packs[number]

    @property
    def sent_bytes(self) -> int:
        """So far, by all."""
        return sum(pack.size for pack in self._packs)

    @property
    def count(self) -> int:
        """Connections."""
        return len(self._packs)

    def keep_alive(self) -> None:
        """Say that we live where nothing else is said. Raises GpuckptError."""
        for pack in self._packs:
            pack.keep_alive()

    def cut(self) -> None:
        """End all connections: whoever waits in one fails."""
        for pack in self._packs:
            with contextlib.suppress(GpuckptError, OSError):
                pack.discard()

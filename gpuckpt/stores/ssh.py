"""A host with gpuckpt as a store: each connection is an ssh that runs `gpuckpt serve` there (stores/serving.py)."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any

from gpuckpt.model import manifest as manifests
from gpuckpt.model import series
from gpuckpt.model.errors import GpuckptError, MachineLacks, TransferFailed
from gpuckpt.stores import frames
from gpuckpt.stores.directory import MAX_SIGNATURE_BYTES
from gpuckpt.stores.protocol import count_pieces
from gpuckpt.system.links import LinkLost
from gpuckpt.system.ssh import FAILED
from gpuckpt.system.ssh_failures import explain, last_words

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from gpuckpt.stores.directory import Admit
    from gpuckpt.stores.protocol import Offer, Piece, Stretch, Ticker
    from gpuckpt.system.extents import Extent
    from gpuckpt.system.ssh import Caller

COMMAND = "gpuckpt"
AHEAD = 4
"""Pieces under way on one connection: what is asked for, or sent and not yet confirmed."""

AHEAD_BYTES = 8 << 20
"""More pieces are asked for where they are small: what is under way must outlast a round trip."""

MOST_ASKED = 64
"""Small ones under way: their questions must never fill the connection, for nobody reads the answers meanwhile."""

ONLY_SFTP = "This service allows sftp connections only"
"""What OpenSSH's server says to every command where it forces internal-sftp (session.c)."""

NOT_FOUND = 127
NOT_EXECUTABLE = 126


class NoGpuckpt(Exception):
    """The host lets us in and has no gpuckpt to run: perhaps a bare SFTP host."""


class Peer:
    """One connection to a serving gpuckpt."""

    def __init__(self, caller: Caller, command: str, *, further: bool = False) -> None:
        """Connect and greet. Raises LinkLost, NoGpuckpt, GpuckptError."""
        self.where = caller.account.host
        self._caller = caller
        self._buffer = frames.Buffer()
        self._call = caller.run(f"{command} serve", further=further)
        self._link = self._call.link
        try:
            self.hello = self._greet(command)
        except BaseException:
            self.close()
            raise

    @property
    def features(self) -> frozenset[str]:
        """What the other side says it can do."""
        told = self.hello.get("features")
        return frozenset(one for one in told if isinstance(one, str)) if isinstance(told, list) else frozenset()

    def _greet(self, command: str) -> dict[str, Any]:
        try:
            frames.await_mark(self._link)
            theirs = frames.receive(self._link, self._buffer).header
            version = frames.common_version(theirs.get("protocol"))
        except LinkLost as lost:
            raise self._why_not(lost, command) from None
        except frames.ProtocolBroken as broken:
            raise NoGpuckpt(str(broken)) from None
        if version is None:
            there = str(theirs.get("gpuckpt"))[:40]
            raise MachineLacks(
                f"gpuckpt {there} on {self.where} speaks another protocol than this one",
                "install the same version of gpuckpt on both hosts",
            )
        frames.send(self._link, {"do": "hello", "protocol": version, "features": []})
        return theirs

    def _why_not(self, lost: LinkLost, command: str) -> Exception:
        status, text = self._call.end()
        if status == FAILED:
            return explain(self._caller, text)
        if status in (NOT_FOUND, NOT_EXECUTABLE):
            return NoGpuckpt(last_words(text))
        if status is None or status < 0:
            return lost
        if ONLY_SFTP in str(lost):
            return NoGpuckpt(ONLY_SFTP)
        return NoGpuckpt(f"`{command} serve` there ended with {status}: {last_words(text)}")

    def ask(
        self, question: dict[str, Any], payload: bytes | memoryview = b"", *, most: int = 0, tick: Ticker | None = None
    ) -> frames.Frame:
        """A question and its answer. Raises LinkLost, or the failure that the other side tells of."""
        self.put(question, payload)
        return self.take(most=most, tick=tick)

    def put(self, question: dict[str, Any], payload: bytes | memoryview | Extent = b"") -> None:
        """Send a question; answers come in the same order. Raises LinkLost."""
        frames.send(self._link, question, payload)

    def take(self, *, most: int = 0, tick: Ticker | None = None) -> frames.Frame:
        """The next answer."""
        while True:
            try:
                frame = frames.receive(self._link, self._buffer, most)
            except frames.ProtocolBroken as broken:
                raise TransferFailed(
                    f"{self.where} does not keep to the protocol: {broken}", "do not trust it"
                ) from None
            frames.raise_failure(frame.header, self.where)
            working = frame.header.get("working")
            if working is None:
                return frame
            if tick is not None and _is_pair(working):
                tick(*working)

    def close(self) -> None:
        """End it, from any thread."""
        self._call.close()


def _is_pair(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(type(one) is int and 0 <= one < 1 << 60 for one in value)


class SshStore:
    """A host with gpuckpt."""

    why = ""

    def __init__(self, caller: Caller, command: str = COMMAND) -> None:
        """Raises LinkLost, NoGpuckpt, GpuckptError."""
        self._caller, self._command = caller, command
        self.first = Peer(caller, command)
        self._first_is_used = threading.Lock()
        """Held while the first connection carries pieces or answers a question."""

    def further(self) -> Peer:
        """The first connection while it is idle, then others. Raises LinkLost, GpuckptError."""
        return self.first if self._first_is_used.acquire(blocking=False) else self.another()

    def another(self) -> Peer:
        """A further connection. Raises LinkLost, GpuckptError."""
        try:
            return Peer(self._caller, self._command, further=True)
        except NoGpuckpt as missing:
            raise LinkLost(str(missing)) from None

    def give_back(self, peer: Peer) -> None:
        """A connection that carries no pieces any more."""
        if peer is self.first:
            self._first_is_used.release()
        else:
            peer.close()

    def keep_alive(self) -> None:
        """Say that we live, where nothing else is said."""
        if self._first_is_used.acquire(blocking=False):
            try:
                self.first.ask({"do": "ping"})
            finally:
                self._first_is_used.release()

    def question(
        self, question: dict[str, Any], payload: bytes = b"", *, most: int = 0, tick: Ticker | None = None
    ) -> frames.Frame:
        """Ask on the first connection. Raises LinkLost, GpuckptError."""
        with self._first_is_used:
            return self.first.ask(question, payload, most=most, tick=tick)

    def leave(self) -> None:
        """Let go what the first connection holds. Raises nothing: the end of a lost connection does it too."""
        with contextlib.suppress(LinkLost, GpuckptError):
            self.question({"do": "leave"})

    def offer(self, path: str, admit: Admit | None = None) -> SshOffer:
        """Open an image for reading."""
        return SshOffer(self, path, admit)

    def receive(self, path: str, raw_manifest: bytes, source: Offer | None = None) -> SshArrival:
        """Begin or go on with sending an image there."""
        return SshArrival(self, path, raw_manifest, source.signature if source is not None else b"")

    def round_trip_seconds(self) -> float:
        """Of one question; the second one, for the first finds everything cold."""
        self.question({"do": "ping"})
        begun = time.monotonic()
        self.question({"do": "ping"})
        return time.monotonic() - begun

    def close(self) -> None:
        """End the first connection."""
        self.first.close()


class SshOffer:
    """An image there."""

    def __init__(self, store: SshStore, path: str, admit: Admit | None = None) -> None:
        self._store = store
        answer = store.question({"do": "open", "path": path}, most=manifests.MAX_BYTES)
        self.path = self._resolved(path, answer.header.get("name"))
        self._opened = self.path or path
        self.raw_manifest = bytes(answer.payload)
        told = str(answer.header.get("signature", "")).encode("ascii", "replace")
        self.signature = told[:MAX_SIGNATURE_BYTES]
        if admit is not None:
            admit(self.raw_manifest, self.signature)
        self.manifest = manifests.decode(self.raw_manifest, f"{store.first.where}:{path}/{manifests.NAME}")

    def _resolved(self, path: str, name: object) -> str:
        """Where it lies there. Only of DIR/latest the other side says what it is called."""
        above, slash, asked = path.rpartition("/")
        if asked != series.LATEST:
            return path
        if not isinstance(name, str):
            return ""
        if not series.names_one(name):
            raise TransferFailed(f"{self._store.first.where} names an image that cannot be", "do not trust it")
        return f"{above}{slash}{name}"

    def open_reader(self) -> SshReader:
        """Another stream."""
        peer = self._store.further()
        if peer is not self._store.first:
            raw = peer.ask({"do": "open", "path": self._opened}, most=manifests.MAX_BYTES).payload
            if bytes(raw) != self.raw_manifest:
                peer.close()
                raise TransferFailed(f"{self._opened} has been exchanged meanwhile", "the same command begins again")
        return SshReader(self._store, peer)

    def verify(self, tick: Ticker) -> str:
        """Have every byte read there."""
        return str(self._store.question({"do": "check"}, tick=tick).header.get("verified"))[:100]

    def close(self) -> None:
        """Let it go; where the connection is lost its end does so."""
        self._store.leave()


class SshReader:
    """Asks for pieces, some ahead."""

    def __init__(self, store: SshStore, peer: Peer) -> None:
        self._store, self._peer = store, peer

    def stream(self, pieces: Iterator[Stretch]) -> Iterator[tuple[Stretch, memoryview]]:
        """Each piece and its bytes. ssh protects them on their way; the whole is compared where it arrives."""
        asked: deque[Stretch] = deque()
        for piece in pieces:
            self._peer.put({"do": "read", "part": piece.part, "at": piece.offset, "size": piece.size})
            asked.append(piece)
            if len(asked) >= AHEAD and (len(asked) >= MOST_ASKED or _size(asked) >= AHEAD_BYTES):
                yield self._next(asked)
        while asked:
            yield self._next(asked)

    def _next(self, asked: deque[Stretch]) -> tuple[Stretch, memoryview]:
        piece = asked.popleft()
        answer = self._peer.take(most=piece.size)
        if len(answer.payload) != piece.size:
            raise TransferFailed(f"a piece from {self._peer.where} has another length", "the same command continues it")
        return piece, answer.payload

    def close(self) -> None:
        """Give the connection back."""
        self._store.give_back(self._peer)

    def cut(self) -> None:
        """End it, from any thread."""
        self._peer.close()


def _size(asked: Iterable[Stretch]) -> int:
    return sum(one.size for one in asked)


class SshArrival:
    """An image that arrives there."""

    durable = True
    """It is on the disk when it is published."""

    def __init__(self, store: SshStore, path: str, raw_manifest: bytes, signature: bytes) -> None:
        self._store = store
        if signature and frames.SIGNATURES not in store.first.features:
            raise MachineLacks(
                f"the gpuckpt on {store.first.where} knows no signatures: it would lose this image's",
                "install the same version of gpuckpt on both hosts",
            )
        question = {"do": "begin", "path": path, "signature": signature.decode("ascii", "replace")}
        answer = store.question(question, raw_manifest).header
        parts = manifests.decode(raw_manifest, manifests.NAME).parts
        try:
            self.place, self._token = str(answer["place"]), str(answer["token"])
            self.already = answer["already"] is True
            self._held = _ranges(answer["held"], [count_pieces(part.size) for part in parts])
        except (KeyError, TypeError, ValueError):
            raise TransferFailed(f"{store.first.where} names pieces that cannot be", "do not trust it") from None

    def held(self) -> dict[int, Sequence[tuple[int, int]]]:
        """What is there already."""
        return self._held

    def open_writer(self) -> SshWriter:
        """Another stream."""
        peer = self._store.further()
        try:
            peer.ask({"do": "join", "path": self.place, "token": self._token})
        except (LinkLost, GpuckptError):
            self._store.give_back(peer)
            raise
        return SshWriter(self._store, peer)

    def verify(self, tick: Ticker) -> Sequence[int]:
        """Have every byte compared there."""
        bad = self._store.question({"do": "verify"}, tick=tick).header.get("bad")
        if not (isinstance(bad, list) and all(type(one) is int and one >= 0 for one in bad)):
            raise TransferFailed(f"{self._store.first.where} names parts that cannot be", "do not trust it")
        return bad

    def publish(self) -> str:
        """Have it synced and renamed."""
        return str(self._store.question({"do": "publish", "durable": self.durable}).header.get("verified"))[:100]

    def close(self) -> None:
        """Let it go; where the connection is lost its end does so."""
        self._store.leave()


def _ranges(held: Any, counts: Sequence[int]) -> dict[int, Sequence[tuple[int, int]]]:
    """Resume points as the other side names them. Raises ValueError, TypeError for what cannot be."""
    found: dict[int, Sequence[tuple[int, int]]] = {}
    for name, spans in dict(held).items():
        index, end_before = int(name), 0
        if not 0 <= index < len(counts):
            raise ValueError(name)
        for start, end in spans:
            if type(start) is not int or type(end) is not int or not end_before <= start < end <= counts[index]:
                raise ValueError(spans)
            end_before = end
        found[index] = [(start, end) for start, end in spans]
    return found


class SshWriter:
    """Sends pieces, some ahead of their confirmations."""

    def __init__(self, store: SshStore, peer: Peer) -> None:
        self._store, self._peer = store, peer
        self._sent: deque[Piece] = deque()

    def send(self, piece: Piece, content: memoryview) -> Iterable[Piece]:
        """Send a piece; returns what was confirmed."""
        return self._send(piece, content)

    def send_extent(self, piece: Piece, extent: Extent) -> Iterable[Piece]:
        """Have the kernel send a piece; returns what was confirmed."""
        return self._send(piece, extent)

    def _send(self, piece: Piece, content: memoryview | Extent) -> Iterable[Piece]:
        self._peer.put({"do": "write", "part": piece.part, "piece": piece.number, "size": piece.size}, content)
        self._sent.append(piece)
        return self._confirmed(AHEAD - 1)

    def drain(self) -> Iterable[Piece]:
        """Wait for all confirmations."""
        return self._confirmed(0)

    def _confirmed(self, most_open: int) -> list[Piece]:
        found = []
        while len(self._sent) > most_open:
            self._peer.take()
            found.append(self._sent.popleft())
        return found

    def close(self) -> None:
        """Give the connection back."""
        self._store.give_back(self._peer)

    def cut(self) -> None:
        """End it, from any thread."""
        self._peer.close()

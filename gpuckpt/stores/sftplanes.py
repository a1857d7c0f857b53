"""Streams of pieces over SFTP, many requests under way; what was confirmed is noted in a journal on the other side."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections import deque
from typing import TYPE_CHECKING, Generic

from gpuckpt.model.errors import ImageCorrupt, TransferFailed, in_words
from gpuckpt.model.records import dataclass
from gpuckpt.stores.journal import RECORD, digest_bytes
from gpuckpt.stores.protocol import FRAME_SURPLUS_BYTES, PIECE_BYTES, Piece, Span, Stretch
from gpuckpt.system.links import LinkLost
from gpuckpt.system.sftp import CREATE, READ, UNDER_WAY, WRITE, Sftp

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from gpuckpt.model.manifest import Part
    from gpuckpt.stores.sftp import SftpStore
    from gpuckpt.system.extents import Extent

AHEAD = 2
"""Pieces under way on one connection."""


@dataclass(frozen=True, slots=True)
class _Asked(Generic[Stretch]):
    """A piece on its way."""

    piece: Stretch
    buffer: bytearray
    content: memoryview
    """Of the buffer."""
    requests: dict[int, int]
    """Where in the piece -> number of the request."""


class SftpReader:
    """Reads pieces, some requests ahead."""

    def __init__(self, store: SftpStore, session: Sftp, root: bytes, parts: Sequence[Part]) -> None:
        self._store, self._session, self._root, self._parts = store, session, root, parts
        self._handles: dict[int, bytes] = {}
        self._buffers: list[bytearray] = []
        """Free ones."""

    def stream(self, pieces: Iterator[Stretch]) -> Iterator[tuple[Stretch, memoryview]]:
        """Each piece and its bytes; what they must be is compared where they arrive."""
        under_way: deque[_Asked[Stretch]] = deque()
        for piece in pieces:
            under_way.append(self._ask(piece))
            if sum(len(asked.requests) for asked in under_way) >= UNDER_WAY:
                self._session.beat()
                yield from self._next(under_way)
        while under_way:
            yield from self._next(under_way)

    def _ask(self, piece: Stretch) -> _Asked[Stretch]:
        handle, size = self._handle(piece.part), self._session.request_bytes
        buffer = self._buffers.pop() if self._buffers else bytearray(PIECE_BYTES + FRAME_SURPLUS_BYTES)
        content = memoryview(buffer)[: piece.size]
        starts = range(0, piece.size, size)
        numbers = [self._session.post_read(handle, piece.offset + at, content[at : at + size]) for at in starts]
        return _Asked(piece, buffer, content, dict(zip(starts, numbers, strict=True)))

    def _next(self, under_way: deque[_Asked[Stretch]]) -> Iterator[tuple[Stretch, memoryview]]:
        asked = under_way.popleft()
        for at, number in asked.requests.items():
            self._fill(asked.piece, asked.content[at : at + self._session.request_bytes], at, number)
        yield asked.piece, asked.content
        self._buffers.append(asked.buffer)

    def _fill(self, piece: Piece | Span, wanted: memoryview, at: int, number: int) -> None:
        """A server may give less than it was asked for: the rest is asked for again."""
        while wanted:
            count = self._session.take_read(number)
            if not count:
                name = self._parts[piece.part].path
                raise ImageCorrupt(f"part {name} is shorter than the manifest says", "copy the image again")
            at, wanted = at + count, wanted[count:]
            if wanted:
                number = self._session.post_read(self._handle(piece.part), piece.offset + at, wanted)

    def _handle(self, index: int) -> bytes:
        if index not in self._handles:
            if len(self._handles) >= UNDER_WAY:
                # The oldest: nothing that is under way is so old.
                self._session.done(self._handles.pop(next(iter(self._handles))))
            place = self._root + b"/" + os.fsencode(self._parts[index].path)
            try:
                self._handles[index] = self._session.open_file(place, READ)
            except OSError as error:
                name = self._parts[index].path
                raise ImageCorrupt(f"part {name} cannot be read: {in_words(error)}", "copy the image again") from None
        return self._handles[index]

    def close(self) -> None:
        """Give the session back."""
        with contextlib.suppress(LinkLost, OSError):
            for handle in self._handles.values():
                self._session.done(handle)
        self._store.give_back(self._session)

    def cut(self) -> None:
        """End it, from any thread."""
        self._session.cut()


class SftpWriter:
    """Writes pieces, some ahead of their confirmations, and notes those that were confirmed."""

    def __init__(
        self,
        store: SftpStore,
        session: Sftp,
        root: bytes,
        parts: Sequence[Part],
        arrived: Callable[[Piece], None] = lambda _: None,
    ) -> None:
        """`arrived` hears of each piece that was confirmed."""
        self._store, self._session, self._root, self._parts, self._arrived = store, session, root, parts, arrived
        self._handles: dict[int, bytes] = {}
        self._under_way: deque[tuple[Piece, list[int]]] = deque()
        self._journal: bytes | None = None
        self._journal_size = 0
        self._noting: list[int] = []
        """Requests that note a piece and are not confirmed yet."""

    def send(self, piece: Piece, content: memoryview) -> Iterable[Piece]:
        """Send a piece; returns what was confirmed."""
        return self._send(piece, content)

    def send_extent(self, piece: Piece, extent: Extent) -> Iterable[Piece]:
        """Have the kernel send a piece; returns what was confirmed."""
        return self._send(piece, extent)

    def _send(self, piece: Piece, content: memoryview | Extent) -> Iterable[Piece]:
        requests = self._session.post_write(self._handle(piece.part), piece.offset, content)
        self._under_way.append((piece, requests))
        self._session.beat()
        return self._confirmed(AHEAD - 1)

    def drain(self) -> Iterable[Piece]:
        """Wait for all confirmations."""
        found = self._confirmed(0)
        try:
            self._noted()
        except OSError as error:
            raise self._why(error) from None
        return found

    def _confirmed(self, most: int) -> list[Piece]:
        found = []
        while len(self._under_way) > most:
            piece, requests = self._under_way.popleft()
            try:
                for number in requests:
                    self._session.answer(number)
                self._note(piece)
            except OSError as error:
                raise self._why(error) from None
            self._arrived(piece)
            found.append(piece)
        return found

    def _why(self, error: OSError) -> TransferFailed:
        free = self._session.free_bytes(self._root)
        if free is not None and free < PIECE_BYTES:
            return TransferFailed("the disk there is full", "make room there; the same command continues it")
        return TransferFailed(f"it cannot be written there: {in_words(error)}", "the same command continues it")

    def _note(self, piece: Piece) -> None:
        """Only now: a journal must never name what was not taken."""
        if self._journal is None:
            place = self._root + b"/journal." + secrets.token_hex(8).encode()
            self._journal = self._session.open_file(place, WRITE | CREATE)
        self._noted()
        record = RECORD.pack(digest_bytes(self._parts[piece.part]), piece.number)
        # Not waited for: whatever was sent since would have to arrive first.
        self._noting = self._session.post_write(self._journal, self._journal_size, memoryview(record))
        self._journal_size += len(record)

    def _noted(self) -> None:
        numbers, self._noting = self._noting, []
        for number in numbers:
            self._session.answer(number)

    def _handle(self, index: int) -> bytes:
        if index not in self._handles:
            if len(self._handles) >= UNDER_WAY:
                self._session.done(self._handles.pop(next(iter(self._handles))))
            place = self._root + b"/" + os.fsencode(self._parts[index].path)
            self._handles[index] = self._session.open_file(place, WRITE | CREATE)
        return self._handles[index]

    def close(self) -> None:
        """Give the session back."""
        with contextlib.suppress(LinkLost, OSError):
            for handle in (*self._handles.values(), *([self._journal] if self._journal else [])):
                self._session.done(handle)
        self._store.give_back(self._session)

    def cut(self) -> None:
        """End it, from any thread."""
        self._session.cut()

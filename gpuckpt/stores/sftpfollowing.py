"""Parts compared on a bare SFTP host while the rest of their image is still being sent there.

Where programs may be run there, they digest what was confirmed, range by range, or whole parts; else it is read back,
in order, over a session of its own: a line carries both ways at once. What this finds fitting is not read again;
whatever it does not come to, or cannot find fitting, is left to the look at all parts (stores/sftpcheck.py).
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from typing import TYPE_CHECKING

import blake3

from gpuckpt.model.errors import GpuckptError
from gpuckpt.stores import farsums
from gpuckpt.stores.protocol import count_pieces, pieces_of
from gpuckpt.stores.sftpcheck import READ_BACK, Comparison, sha256_by
from gpuckpt.stores.sftplanes import SftpReader
from gpuckpt.stores.sftpranges import PLAIN, FarRanges
from gpuckpt.system.links import LinkLost

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from gpuckpt.model.manifest import Part
    from gpuckpt.stores.protocol import Offer, Piece, Ticker
    from gpuckpt.stores.sftp import SftpStore

WORTH_FOLLOWING = 64 << 20
"""Bytes on their way; it takes a connection."""

WORTH_A_QUESTION = 256 << 20
"""Bytes of whole parts for one run of a program there: each is a connection, some 0.3 s of both sides' cores."""

RANGE_PIECES = 16
"""Of one digest there: its programs cost some 5 ms, and after the last piece the last range is waited for."""

LOOK_SECONDS = 0.2
END_SECONDS = 2.0


class Following:
    """Compares what has arrived, in a thread of its own; begins with the first piece."""

    def __init__(
        self,
        store: SftpStore,
        root: bytes,
        parts: Sequence[Part],
        held: Mapping[int, Iterable[int]],
        source: Offer | None,
    ) -> None:
        self._store, self._root, self._parts, self._source = store, root, parts, source
        self._there = {index: set(pieces) for index, pieces in held.items()}
        self._begun: list[int] = []
        """Parts of which pieces have come, in the order of their first."""
        self._taken = 0
        """How many of them."""
        self._fitting: set[int] = set()
        self._how = ""
        self._last: int | None = None
        """With which of them it ends."""
        self._piecewise = False
        self._all_sent = self._over = False
        self._changed = threading.Condition()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._cut: Callable[[], None] | None = None
        """Ends its connection."""

    def arrived(self, piece: Piece) -> None:
        """A piece was confirmed; from any thread."""
        with self._changed:
            pieces = self._there.setdefault(piece.part, set())
            if piece.part not in self._begun:
                self._begun.append(piece.part)
            pieces.add(piece.number)
            self._changed.notify()
            if self._thread is None and not self._over:
                self._thread = threading.Thread(target=self._follow, name="following", daemon=True)
                self._thread.start()

    def take_no_more(self) -> set[int]:
        """All is sent: what is under way is compared to its end, and little more. The parts that are compared here."""
        with self._changed:
            self._all_sent = True
            self._last = self._taken
            if self._piecewise:
                rest = self._begun[self._taken :]
                self._last += len(rest) if sum(self._parts[index].size for index in rest) < WORTH_FOLLOWING else 0
            self._changed.notify()
            return set(self._begun[: self._last])

    def finish(self, tick: Ticker) -> tuple[set[int], str]:
        """Wait for what is under way. The parts that fit, and by what that was seen."""
        if self._thread is not None:
            total = sum(part.size for part in self._parts)
            while not self._ended.wait(LOOK_SECONDS):
                tick(sum(self._parts[index].size for index in list(self._fitting)), total)
        return self._fitting, self._how

    def close(self) -> None:
        """End it. A connection that does not come is not waited for."""
        with self._changed:
            self._over = True
            self._changed.notify()
            cut, running = self._cut, self._thread is not None
        if cut is not None:
            cut()
        if running:
            self._ended.wait(END_SECONDS)

    def _follow(self) -> None:
        try:
            # What goes wrong here is met again, and told, by the look at all parts.
            with contextlib.suppress(_Over, LinkLost, GpuckptError, OSError, EOFError):
                if not (self._by_ranges() or self._by_programs()):
                    self._read_back()
        finally:
            self._ended.set()

    def _by_ranges(self) -> bool:
        """Have a program there read ranges of what was confirmed; False where this cannot be done."""
        programs = self._store.without_programs
        if self._source is None or programs.issuperset(farsums.PROGRAMS) or not PLAIN.fullmatch(self._root):
            return False
        try:
            there = FarRanges(self._store.caller, self._root, self._parts, self._require_not_over)
        except TimeoutError:
            return False
        with self._changed:
            self._cut = there.cut
        try:
            if there.program not in farsums.SHA256:
                return False
            # Of the others it is known now.
            programs.update(list(farsums.PROGRAMS)[: list(farsums.PROGRAMS).index(there.program)])
            self._how, self._piecewise = sha256_by(there.program), True
            while True:
                index = self._next_part()
                whole = blake3.blake3()
                same = all(there.fit(pieces, self._source, whole) for pieces in in_ranges(self._pieces(index)))
                if same and whole.hexdigest() == self._parts[index].blake3:
                    self._fitting.add(index)
        finally:
            there.cut()

    def _by_programs(self) -> bool:
        """Give whole parts to a program there; False where none can be run."""
        if self._store.without_programs.issuperset(farsums.PROGRAMS):
            return False
        while True:
            some = self._whole_parts()
            tick = self._tick
            found = Comparison(self._store, self._root, self._parts, tick).by_programs(some, self._source)
            if found is None:
                # All are looked at again: what was found fitting by then counts no more.
                with self._changed:
                    self._taken = 0
                    self._fitting.clear()
                return False
            fitting, self._how = found
            self._fitting.update(fitting)

    def _whole_parts(self) -> list[int]:
        """The next parts that are there whole, once they are worth a question."""
        with self._changed:
            while True:
                self._require_wanted()
                some: list[int] = []
                for index in self._begun[self._taken :]:
                    if len(self._there[index]) < count_pieces(self._parts[index].size):
                        break
                    some.append(index)
                if sum(self._parts[index].size for index in some) >= WORTH_A_QUESTION:
                    self._taken += len(some)
                    return some
                self._changed.wait()

    def _tick(self, _done: int, _total: int) -> None:
        self._require_not_over()

    def _require_not_over(self) -> None:
        if self._over:
            raise _Over

    def _require_wanted(self) -> None:
        if self._over or self._all_sent:
            raise _Over

    def _read_back(self) -> None:
        self._how, self._piecewise = READ_BACK, True
        reader = SftpReader(self._store, self._store.another(), self._root, self._parts)
        with self._changed:
            self._cut = reader.cut
        try:
            while True:
                index = self._next_part()
                hasher = blake3.blake3()
                for _, content in reader.stream(self._pieces(index)):
                    hasher.update(content)
                if hasher.hexdigest() == self._parts[index].blake3:
                    self._fitting.add(index)
        finally:
            reader.close()

    def _next_part(self) -> int:
        with self._changed:
            while True:
                self._require_not_over()
                if self._taken < (len(self._begun) if self._last is None else self._last):
                    self._taken += 1
                    return self._begun[self._taken - 1]
                self._require_wanted()
                self._changed.wait()

    def _pieces(self, index: int) -> Iterator[Piece]:
        """A part's pieces, each as soon as it is there."""
        for piece in pieces_of(index, self._parts[index]):
            with self._changed:
                while not self._over and piece.number not in self._there[index]:
                    if self._all_sent:
                        raise _Over
                    self._changed.wait()
                if self._over:
                    raise _Over
            yield piece


def in_ranges(pieces: Iterator[Piece]) -> Iterator[list[Piece]]:
    """A part's pieces, RANGE_PIECES at once."""
    while some := list(itertools.islice(pieces, RANGE_PIECES)):
        yield some


class _Over(Exception):
    """Nothing more is to be compared here."""

"""The engine of a transfer: pieces of an image out of one store into another, over several lanes at once.

A lane is a thread with a reader and a writer of its own. The lanes share one queue; a lane that cannot be
opened leaves its share to the others, a lane that breaks ends the attempt, and the next attempt asks the
other side what has arrived.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from typing import TYPE_CHECKING

from gpuckpt.model.errors import GpuckptError
from gpuckpt.stores.protocol import InFiles, Piece, TakesExtents, count_pieces, pieces_of
from gpuckpt.system.links import LinkLost

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from gpuckpt.model.manifest import Part
    from gpuckpt.stores.protocol import Reader, Writer

FAR_AWAY_SECONDS = 0.02
"""From this round trip on one connection is limited by its window (2 MiB at OpenSSH), not by a core."""

LANES_FAR_AWAY = 8
WORTH_A_LANE_FAR_AWAY = 32 << 20
MOST_LANES_NEAR = 4
CORES_FOR_A_LANE = 2
"""ssh encrypts on one, what reads, hashes and writes needs most of another."""
WORTH_A_LANE_NEAR = 256 << 20
"""A connection costs some 0.4 s of both sides, in which another one carries half of this."""
WORTH_SHARING_CORES = 768 << 20
"""Into files one for each core: the far side's one process also makes each new page of the file, which takes as long
as decrypting it. On 2 cores, both sides there, 2 GB took 5.0 s over one connection and 4.0 s over two (medians of six),
1 GB 1.6 and 1.8 s, and a restore of 1.8 GB 2.9 and 3.1 s; three are slower than two."""


def lane_count(
    wanted: int | None, round_trip_seconds: float, size: int, pieces: int, *, into_files: bool = False
) -> int:
    """How many connections shall carry `size` bytes in so many pieces; `wanted` is what the person asked for.

    `into_files`: they are stored at the other end, not used at once.
    """
    if wanted is not None:
        return max(1, min(wanted, pieces))
    if round_trip_seconds > FAR_AWAY_SECONDS:
        return max(1, min(LANES_FAR_AWAY, size // WORTH_A_LANE_FAR_AWAY))
    cores = len(os.sched_getaffinity(0))
    with_room = min(cores // CORES_FOR_A_LANE, size // WORTH_A_LANE_NEAR)
    sharing = min(cores, size // WORTH_SHARING_CORES) if into_files else 0
    return max(1, min(MOST_LANES_NEAR, max(with_room, sharing)))


def missing_pieces(parts: Sequence[Part], held: dict[int, Sequence[tuple[int, int]]]) -> list[Piece]:
    """All pieces that are not held, in the order of the parts."""
    found: list[Piece] = []
    for index, part in enumerate(parts):
        there = held.get(index, ())
        if list(there) != [(0, count_pieces(part.size))]:
            found += [one for one in pieces_of(index, part) if not any(a <= one.number < b for a, b in there)]
    return found


class _Waiting:
    """What nobody carries yet. A lane takes part by part: one that it carries whole can be hashed as it arrives.

    A lane that finds no part left helps another one out, from the end of its part, unless that is nearly done: a part
    that came over several lanes has to be read again to be compared.
    """

    def __init__(self, pieces: Iterable[Piece]) -> None:
        self._lock = threading.Lock()
        self._parts: deque[_Rest] = deque()
        """Those that no lane has begun with."""
        self._begun: list[_Rest] = []
        for piece in pieces:
            if not self._parts or self._parts[-1].pieces[-1].part != piece.part:
                self._parts.append(_Rest())
            self._parts[-1].add(piece)

    def __len__(self) -> int:
        return sum(len(rest.pieces) for rest in (*self._parts, *self._begun))

    def clear(self) -> None:
        """Nothing more is to be carried."""
        with self._lock:
            for rest in (*self._parts, *self._begun):
                rest.pieces.clear()

    def taken(self) -> Iterator[Piece]:
        """Pieces for one lane, taken as they are asked for."""
        own = _Rest()
        while True:
            with self._lock:
                piece, own = self._next(own)
            if piece is None:
                return
            yield piece

    def _next(self, own: _Rest) -> tuple[Piece | None, _Rest]:
        if not own.pieces and self._parts:
            own = self._parts.popleft()
            self._begun = [rest for rest in self._begun if rest.pieces] + [own]
        if own.pieces:
            return own.pieces.popleft(), own
        shareable = [rest for rest in self._begun if rest.is_worth_sharing]
        if not shareable:
            return None, own
        return max(shareable, key=lambda rest: len(rest.pieces)).give_last(), own


class _Rest:
    """What is left of a part."""

    NEARLY_DONE = 4
    """With a fourth of it left."""

    def __init__(self) -> None:
        self.pieces: deque[Piece] = deque()
        self._all = 0
        self._shared = False

    def add(self, piece: Piece) -> None:
        self.pieces.append(piece)
        self._all += 1

    def give_last(self) -> Piece:
        """For another lane."""
        self._shared = True
        return self.pieces.pop()

    @property
    def is_worth_sharing(self) -> bool:
        return bool(self.pieces) and (self._shared or len(self.pieces) * self.NEARLY_DONE > self._all)


class Lanes:
    """Carries pieces until all have arrived. Use as a context manager: leaving it ends all lanes."""

    def __init__(
        self, pieces: Iterable[Piece], open_reader: Callable[[], Reader], open_writer: Callable[[], Writer]
    ) -> None:
        self._waiting = _Waiting(pieces)
        self._remaining = len(self._waiting)
        self._open_reader, self._open_writer = open_reader, open_writer
        self._threads: list[threading.Thread] = []
        self._lanes: list[_Lane] = []
        self._lock = threading.Lock()
        self._over = False
        self._changed = threading.Event()
        """All has arrived, or a lane has failed."""
        self.arrived_bytes = 0
        self.failures: list[BaseException] = []
        self.unopened: list[str] = []
        """Why lanes besides the first could not be opened."""

    def start(self, count: int) -> None:
        """Open the first lane, then start all. Raises what opening it raises."""
        first = self._open()
        self._begin(lambda: self._carry(first))
        for _ in range(count - 1):
            self._begin(self._open_and_carry)

    def _begin(self, act: Callable[[], None]) -> None:
        thread = threading.Thread(target=act, name=f"lane-{len(self._threads)}", daemon=True)
        self._threads.append(thread)
        thread.start()

    @property
    def count(self) -> int:
        """Lanes that were opened."""
        return len(self._lanes)

    def wait(self, seconds: float) -> bool:
        """Wait at most that long; True when all pieces have arrived. Raises the first failure of a lane."""
        self._changed.wait(seconds)
        if self.failures:
            raise self.failures[0]
        return self._remaining == 0

    def __enter__(self) -> Lanes:  # noqa: PYI034 - typing.Self comes with 3.11
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        with self._lock:
            self._over = True
            self._waiting.clear()
            lanes = list(self._lanes)
        for lane in lanes:
            if kind is not None:
                lane.cut()
            # One that is still being opened ends itself; a connection that does not come is not waited for.
            lane.ended.wait()

    def _open(self) -> _Lane:
        reader = self._open_reader()
        try:
            lane = _Lane(reader, self._open_writer())
        except BaseException:
            reader.close()
            raise
        with self._lock:
            if not self._over:
                self._lanes.append(lane)
                return lane
        lane.close()
        raise LinkLost("not needed any more")

    def _open_and_carry(self) -> None:
        try:
            lane = self._open()
        except (LinkLost, GpuckptError, OSError) as error:
            self.unopened.append(str(error))
            return
        self._carry(lane)

    def _carry(self, lane: _Lane) -> None:
        try:
            for arrived in lane.carry(self._waiting.taken()):
                self._count(arrived)
            self._count(lane.writer.drain())
        except BaseException as error:  # noqa: BLE001 - it is raised in the thread that waits
            self.failures.append(error)
            self._changed.set()
        finally:
            lane.close()

    def _count(self, pieces: Iterable[Piece]) -> None:
        arrived = list(pieces)
        with self._lock:
            self.arrived_bytes += sum(piece.size for piece in arrived)
            self._remaining -= len(arrived)
            if self._remaining == 0:
                self._changed.set()


class _Lane:
    def __init__(self, reader: Reader, writer: Writer) -> None:
        self.reader, self.writer = reader, writer
        self.ended = threading.Event()

    def carry(self, pieces: Iterator[Piece]) -> Iterator[Iterable[Piece]]:
        """Send them; gives what has arrived meanwhile."""
        if isinstance(self.reader, InFiles) and isinstance(self.writer, TakesExtents):
            for piece in pieces:
                yield self.writer.send_extent(piece, self.reader.extent(piece))
            return
        for piece, content in self.reader.stream(pieces):
            yield self.writer.send(piece, content)

    def cut(self) -> None:
        self.reader.cut()
        self.writer.cut()

    def close(self) -> None:
        self.reader.close()
        self.writer.close()
        self.ended.set()

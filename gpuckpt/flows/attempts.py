"""One push or pull: attempts until the image stands there, each from what the last one left.

    connect -> what is there -> pieces over the lanes -> every byte compared -> synced, renamed

A line that breaks is connected again, a few times in a row without progress; everything else ends the run.
"""

from __future__ import annotations

import errno
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from gpuckpt.flows import apart, far
from gpuckpt.flows.interruption import BrokenOff
from gpuckpt.flows.lanes import Lanes, lane_count, missing_pieces
from gpuckpt.flows.reconnecting import LOOK_SECONDS, PAUSES, Patience, unwaited
from gpuckpt.model.errors import (
    Busy,
    GpuckptError,
    ImageCorrupt,
    Interrupted,
    MachineLacks,
    TransferFailed,
    in_words,
)
from gpuckpt.model.report import Event
from gpuckpt.stores import directory
from gpuckpt.stores.journal import held_bytes
from gpuckpt.system.links import LinkLost, Pace
from gpuckpt.system.ssh_failures import NotReached

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from gpuckpt.flows.interruption import Interruption
    from gpuckpt.model.requests import Reach
    from gpuckpt.stores.protocol import Arrival, Offer, Piece, Store

    Listener = Callable[[Event], None]

ALIVE_SECONDS = 10.0


@dataclass
class Tally:
    """What a transfer has done so far, over all its attempts."""

    sent: int = 0
    skipped: int | None = None
    connections: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


class FarSide(Protocol):
    """What an attempt needs of the connection, besides the image behind it."""

    why: str

    def round_trip_seconds(self) -> float:
        """How long a question and its answer take."""

    def keep_alive(self) -> None:
        """To be called every few seconds. Raises LinkLost."""

    def close(self) -> None:
        """The attempt is over."""


@dataclass
class Ends:
    """Both ends of one attempt."""

    offer: Offer
    arrival: Arrival
    far: FarSide


class Run:
    """One push or pull: its attempts, what it tells, and when it gives up."""

    def __init__(self, reach: Reach, listener: Listener, interruption: Interruption) -> None:
        self._reach, self._listener, self._interruption = reach, listener, interruption
        self.pace = Pace(reach.bytes_per_second) if reach.bytes_per_second else None
        self.tally = Tally()
        self._alive_at = time.monotonic()
        keeper = apart.keeper()
        for words in keeper.missing if keeper is not None else ():
            self.note(words)

    def note(self, words: str) -> None:
        """Something the person should know; once."""
        if words not in self.tally.notes:
            self.tally.notes.append(words)

    def data(self, offer: Offer, location: str, verified: str) -> dict[str, Any]:
        """The report's data."""
        tally = self.tally
        return {
            "image_id": offer.manifest.image_id,
            "location": location,
            "bytes_sent": tally.sent,
            "bytes_skipped": tally.skipped or 0,
            "connections": tally.connections,
            "verified": verified,
            "seconds": tally.seconds,
            "notes": tally.notes,
        }

    def ends(self, store: FarSide, both: Callable[[], tuple[Offer, Arrival]]) -> Ends:
        """Both ends of an attempt; the connection is closed where they cannot be had."""
        if store.why:
            self.note(f"{self._reach.location.host} has no gpuckpt that answers ({store.why}): over SFTP")
        try:
            return Ends(*both(), store)
        except BaseException:
            store.close()
            raise

    def carry(self, open_ends: Callable[[], Ends]) -> tuple[str, str]:
        """Attempts until the image stands there. Returns its place and by what it was verified."""
        patience, last_sign = Patience(), time.monotonic()
        while True:
            try:
                return self._attempt(open_ends)
            except (LinkLost, NotReached) as lost:
                last_sign, seconds = time.monotonic(), patience.after_a_break(self.tally.sent)
                if seconds is None or self.tally.skipped is None:
                    raise far.as_failure(self._reach, lost) from None
                self._pause(seconds, str(lost))
            except Busy:
                # The other side has not noticed yet that our last connection has gone.
                if not patience.broken or time.monotonic() - last_sign > 2 * self._reach.stall_seconds:
                    raise
                self._pause(PAUSES[1], "the other side still waits for the last connection")
            except BrokenOff as trouble:
                raise self._broken_off(trouble) from None
            except OSError as error:
                raise _local_trouble(error) from None

    def _broken_off(self, trouble: BrokenOff) -> GpuckptError:
        if trouble.signal_number is None:
            return TransferFailed(trouble.why, far.AGAIN)
        number = trouble.signal_number or signal.SIGINT
        return Interrupted(
            number, "broken off; what has arrived stays, the same command continues it", process="untouched"
        )

    def _pause(self, seconds: float, why: str) -> None:
        self._listener(Event("transfer", "note", f"{why}; connecting again"))
        until = time.monotonic() + seconds
        try:
            while time.monotonic() < until:
                self._interruption.check()
                time.sleep(LOOK_SECONDS)
        except BrokenOff as trouble:
            raise self._broken_off(trouble) from None

    def _attempt(self, open_ends: Callable[[], Ends]) -> tuple[str, str]:
        ends = self._opened(open_ends)
        try:
            return self.through(ends)
        finally:
            ends.arrival.close()
            ends.far.close()

    def through(self, ends: Ends) -> tuple[str, str]:
        """One attempt between these ends, which stay open. Returns the image's place and by what it was verified.

        Raises LinkLost, NotReached, OSError, GpuckptError, and what the interruption raises.
        """
        parts = ends.offer.manifest.parts
        held = ends.arrival.held()
        if self.tally.skipped is None:
            self.tally.skipped = directory.sizes(parts) if ends.arrival.already else held_bytes(parts, held)
        if not ends.arrival.already:
            self._timed("transfer", lambda: self._send(ends, missing_pieces(parts, held)))
        self._timed("verify", lambda: self._verify(ends))
        return ends.arrival.place, self._timed("publish", lambda: self._at_length(ends.far, ends.arrival.publish))

    def _opened(self, open_ends: Callable[[], Ends]) -> Ends:
        """Connect, without making a signal wait for a host that does not answer."""
        return unwaited(open_ends, self._interruption.check, lambda ends: ends.far.close())

    def _timed(self, phase: str, act: Callable[[], Any]) -> Any:
        self._listener(Event(phase, "begin"))
        begun = time.monotonic()
        try:
            return act()
        finally:
            seconds = time.monotonic() - begun
            self.tally.seconds[phase] = self.tally.seconds.get(phase, 0.0) + seconds
            self._listener(Event(phase, "end", seconds=seconds))

    def _send(self, ends: Ends, pieces: Sequence[Piece]) -> None:
        if not pieces:
            return
        total = directory.sizes(ends.offer.manifest.parts)
        size = sum(piece.size for piece in pieces)
        with Lanes(pieces, ends.offer.open_reader, ends.arrival.open_writer) as lanes:
            try:
                lanes.start(self._lanes(ends, size, len(pieces)))
                while not lanes.wait(LOOK_SECONDS):
                    self._look(ends.far)
                    done = total - size + lanes.arrived_bytes
                    self._listener(Event("transfer", "progress", done_bytes=done, total_bytes=total))
                self._listener(Event("transfer", "progress", done_bytes=total, total_bytes=total))
            finally:
                self.tally.sent += lanes.arrived_bytes
                self.tally.connections = max(self.tally.connections, lanes.count)
                for why in lanes.unopened[:1]:
                    self.note(f"fewer connections than wanted: {why}")

    def _lanes(self, ends: Ends, size: int, pieces: int) -> int:
        return lane_count(self._reach.connections, ends.far.round_trip_seconds(), size, pieces, into_files=True)

    def _look(self, store: FarSide) -> None:
        self._interruption.check()
        if time.monotonic() - self._alive_at > ALIVE_SECONDS:
            self._alive_at = time.monotonic()
            store.keep_alive()

    def _verify(self, ends: Ends) -> None:
        parts = ends.offer.manifest.parts
        bad = self._verified(ends)
        if not bad:
            return
        if any(not 0 <= index < len(parts) for index in bad):
            raise TransferFailed(f"{self._reach.location.host} names parts that cannot be", "do not trust it")
        self.note(f"{len(bad)} of {len(parts)} parts did not fit and were sent again")
        held = dict.fromkeys(bad, ())
        wanted = [piece for piece in missing_pieces(parts, {}) if piece.part in held]
        self._send(ends, wanted)
        if self._verified(ends):
            name = parts[bad[0]].path
            raise ImageCorrupt(
                f"part {name} does not fit the manifest, sent twice: the image it is read from is damaged",
                "look at it with `gpuckpt inspect --verify`",
            )

    def _verified(self, ends: Ends) -> Sequence[int]:
        found: Sequence[int] = self._at_length(ends.far, lambda: ends.arrival.verify(self._tick))
        return found

    def _tick(self, done: int, total: int) -> None:
        self._interruption.check()
        self._listener(Event("verify", "progress", done_bytes=done, total_bytes=total))

    def _at_length(self, store: FarSide, act: Callable[[], Any]) -> Any:
        """Do something long beside; a signal ends the connection, and with it what waits for its answer."""
        with ThreadPoolExecutor(1) as pool:
            future = pool.submit(act)
            try:
                while not wait_for([future], LOOK_SECONDS).done:
                    self._look(store)
            except BaseException:
                store.close()
                raise
        return future.result()

    def look_only(self, ends_of: Callable[[Store], Offer]) -> tuple[Offer, str]:
        """Have an image verified where it lies. Raises GpuckptError."""
        store = far.connect_or_fail(self._reach, self.pace)
        try:
            offer = ends_of(store)
            return offer, self._timed("verify", lambda: self._at_length(store, lambda: offer.verify(self._tick)))
        except LinkLost as lost:
            raise TransferFailed(f"{self._reach.location.host}: {lost}", far.AGAIN) from None
        except BrokenOff as trouble:
            raise self._broken_off(trouble) from None
        finally:
            store.close()


def _local_trouble(error: OSError) -> GpuckptError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return TransferFailed(f"the disk is full: {in_words(error)}", "make room; the same command continues it")
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return MachineLacks(in_words(error), "choose a directory this user may write to")
    return TransferFailed(in_words(error), "mend that; the same command continues it")

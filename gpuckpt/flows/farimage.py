"""An image on another host while it is restored here: the connection to it, and its frames over several of them.

The tree that is filled is held meanwhile, so a connection that breaks is opened again and goes on with the frame
that was under way; what was taken out of the queue and not delivered is asked for once more.
"""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from gpuckpt.flows import far
from gpuckpt.flows.reconnecting import Patience, unwaited
from gpuckpt.images.decoding import Decoder
from gpuckpt.images.packindex import FRAME_BYTES, ZERO
from gpuckpt.images.packs import page_aligned
from gpuckpt.model.errors import GpuckptError, ImageCorrupt, TransferFailed, in_words
from gpuckpt.stores.protocol import Span
from gpuckpt.system.links import LinkLost, Pace
from gpuckpt.system.ssh_failures import NotReached

if TYPE_CHECKING:
    import mmap
    from collections.abc import Callable, Iterator

    from gpuckpt.images.packindex import Frame, Index
    from gpuckpt.model.manifest import Manifest
    from gpuckpt.model.requests import Reach
    from gpuckpt.stores.directory import Admit
    from gpuckpt.stores.protocol import Offer, Reader, Store

Work = TypeVar("Work")
Asked = deque[tuple["Frame", Work]]

ALIVE_SECONDS = 10.0
REMEMBERED = 8
"""Frames that were read one by one and are kept: the pages that are compared come from few."""


def begins_again(failure: GpuckptError) -> GpuckptError:
    """A failure of a transfer as one of a restore: nothing of it stays that could be gone on with."""
    failure.hint = failure.hint.replace("continues it", "begins again")
    return failure


@dataclass(frozen=True, slots=True, eq=False)
class Opened:
    """A connection, and the image that was opened over it."""

    store: Store
    offer: Offer
    round_trip_seconds: float


class FarImage:
    """An image on another host. All threads share one connection, or open further ones beside it."""

    def __init__(
        self,
        reach: Reach,
        tell: Callable[[str], None],
        connect: Callable[[Reach, Pace | None], Store] = far.connect,
        admit: Admit | None = None,
    ) -> None:
        """`tell` hears that a connection broke; `admit` lets the image pass, or raises."""
        self._connect, self._admit = connect, admit
        self.reach = reach
        self._path = reach.location.path
        self.pace = Pace(reach.bytes_per_second) if reach.bytes_per_second else None
        self.received_bytes = 0
        self.connections = 0
        """The most at once."""
        self._tell = tell
        self._patience = Patience()
        self._turn = threading.Lock()
        """Held while the connection is opened or given up; not to end it."""
        self._opened: Opened | None = None
        self._raw_manifest: bytes | None = None
        self._over = threading.Event()
        # Of its own: hooks, checks and CRIU take their time, and whoever waits for them hears signals.
        threading.Thread(target=self._stay_alive, daemon=True).start()

    def current(self) -> Opened:
        """The connection, opened where there is none. Raises LinkLost, GpuckptError."""
        with self._turn:
            self.require_wanted()
            if self._opened is None:
                self._opened = unwaited(self._open, self.require_wanted, lambda opened: opened.store.close())
            return self._opened

    def insist(self) -> Opened:
        """As `current`, trying again for a while. Raises GpuckptError."""
        while True:
            try:
                return self.current()
            except (LinkLost, NotReached) as lost:
                self.lost(None, lost)

    def _open(self) -> Opened:
        store = self._connect(self.reach, self.pace)
        try:
            with far.naming_newest("restore", self.reach.location):
                offer = store.offer(self._path, self._admit)
            self._require_same(offer.raw_manifest)
            # DIR/latest may lead to another one when this connection has gone.
            self._path = offer.path or self._path
            return Opened(store, offer, store.round_trip_seconds())
        except BaseException:
            store.close()
            raise

    def _require_same(self, raw_manifest: bytes) -> None:
        if self._raw_manifest not in (None, raw_manifest):
            raise TransferFailed(f"{self.reach.location} has been exchanged meanwhile", "look what is there")
        self._raw_manifest = raw_manifest

    def require_wanted(self) -> None:
        """Raises LinkLost once nothing more is wanted."""
        if self._over.is_set():
            raise LinkLost("nothing more is wanted")

    def lost(self, opened: Opened | None, why: Exception) -> None:
        """Give a connection up, and wait until another one may be opened: the next `current` does it.

        Raises TransferFailed when that has been tried often enough, LinkLost once nothing more is wanted.
        """
        with self._turn:
            given_up = self._opened is opened
            if given_up:
                self.let_go()
            self.require_wanted()  # also of who is late: asking again would be answered the same for ever
            if not given_up:
                return  # another thread has seen to it
            seconds = self._patience.after_a_break(self.received_bytes)
            if seconds is None:
                raise begins_again(far.as_failure(self.reach, why))
            self._tell(f"{why}; connecting again")
            self._over.wait(seconds)
            self.require_wanted()

    def let_go(self) -> None:
        """Close the connection."""
        opened, self._opened = self._opened, None
        if opened is not None:
            opened.store.close()

    def _stay_alive(self) -> None:
        """Say now and then that we live; what has gone all the same is opened again when it is needed."""
        while not self._over.wait(ALIVE_SECONDS):
            opened = self._opened
            if opened is not None:
                with contextlib.suppress(LinkLost, GpuckptError):
                    opened.store.keep_alive()

    def end(self) -> None:
        """Nothing more is wanted; from any thread. What waits for the other side raises."""
        self._over.set()
        opened = self._opened
        if opened is not None:
            opened.store.close()


class FarFrames:
    """Its frames (a FrameSource): each thread has a connection of its own."""

    def __init__(
        self,
        image: FarImage,
        manifest: Manifest,
        index: Index,
        connections: Callable[[int], int],
        look: Callable[[], None],
    ) -> None:
        """`connections` says how many are worth opening for so many bytes.

        `look` is called while single frames are waited for, and may raise. Raises ImageCorrupt.
        """
        self._image = image
        self._parts = _parts_of(manifest, index)
        self._decoder = Decoder(index)
        self._look = look
        self._connections_for = connections
        self._lock = threading.Lock()
        self._shares = _Shares()
        self._readers: set[Reader] = set()
        self._over = False
        self._remembered: OrderedDict[tuple[int, int, bytes], bytes] = OrderedDict()

    def threads(self, size: int) -> int:
        """One for each connection."""
        return self._connections_for(size)

    def read(self, frame: Frame) -> memoryview:
        """One frame; for the main thread."""
        key = (frame.pack, frame.at, frame.digest)
        if key not in self._remembered:
            self._remembered[key] = self._fetch(frame)
            if len(self._remembered) > REMEMBERED:
                self._remembered.popitem(last=False)
        return memoryview(self._remembered[key])

    def _fetch(self, frame: Frame) -> bytes:
        if frame.pack == ZERO:
            self.verify_zero(frame)
            return bytes(frame.raw)
        buffer = page_aligned(FRAME_BYTES)

        def act() -> bytes:
            for _ in self.stream(iter([(frame, None)]), buffer):
                pass
            return buffer[: frame.raw]

        return unwaited(act, self._look, lambda _content: None)

    def stream(self, wanted: Iterator[tuple[Frame, Work]], buffer: mmap.mmap) -> Iterator[tuple[Frame, Work]]:
        """Each frame, verified, as it comes; a connection that breaks is opened again."""
        asked: Asked[Work] = deque()
        with _Share(self._shares) as share:
            while True:
                opened = reader = None
                try:
                    opened = self._image.current()
                    reader = self._reader_of(opened)
                    share.take_on()
                    yield from self._handed_out(reader, asked, wanted, buffer)
                except (LinkLost, GpuckptError) as lost:
                    if reader is None and not asked and share.others_do_it():
                        return  # a further connection that cannot be had
                    if not isinstance(lost, (LinkLost, NotReached)):
                        raise begins_again(lost) from None
                    self._image.lost(opened, lost)
                except OSError as error:
                    raise TransferFailed(f"on {self._image.reach.location.host}: {in_words(error)}") from None
                else:
                    share.all_done()
                    return

    def _reader_of(self, opened: Opened) -> Reader:
        reader = unwaited(opened.offer.open_reader, self._image.require_wanted, lambda late: late.close())
        with self._lock:
            self._readers.add(reader)
            self._image.connections = max(self._image.connections, len(self._readers))
            over = self._over
        if over:
            reader.cut()
        return reader

    def _handed_out(
        self, reader: Reader, asked: Asked[Work], wanted: Iterator[tuple[Frame, Work]], buffer: mmap.mmap
    ) -> Iterator[tuple[Frame, Work]]:
        whole = False
        try:
            for span, content in reader.stream(self._spans(asked, wanted)):
                frame, work = asked[0]
                self._decoder.decode(frame, content, memoryview(buffer)[: frame.raw])
                asked.popleft()
                with self._lock:
                    self._image.received_bytes += span.size
                yield frame, work
            whole = True
        finally:
            if not whole:
                reader.cut()  # answers are under way that nobody will take
            reader.close()
            with self._lock:
                self._readers.discard(reader)

    def _spans(self, asked: Asked[Work], wanted: Iterator[tuple[Frame, Work]]) -> Iterator[Span]:
        """What is to be asked for: first what an earlier connection has not delivered."""
        for frame, _ in list(asked):
            yield self._span(frame)
        for frame, work in wanted:
            asked.append((frame, work))
            yield self._span(frame)

    def _span(self, frame: Frame) -> Span:
        return Span(self._parts[frame.pack], frame.at, frame.stored)

    def verify_zero(self, frame: Frame) -> None:
        """Compare the digest of a frame of which nothing is stored. Raises ImageCorrupt."""
        self._decoder.verify_zero(frame)

    def cut(self) -> None:
        """End all streams."""
        self._image.end()
        with self._lock:
            self._over = True
            readers = list(self._readers)
        for reader in readers:
            reader.cut()

    def close(self) -> None:
        """Let the other side go."""
        self._image.end()


class _Shares:
    """Who works. A thread that once had a connection does not go before all is done, or it has failed."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.opening = self.committed = 0
        """Threads that are about to get a connection, and those that had one."""
        self.done = False


class _Share:
    """One thread's part in it."""

    def __init__(self, shares: _Shares) -> None:
        self._shares = shares
        self._committed = False

    def __enter__(self) -> _Share:  # noqa: PYI034 - typing.Self comes with 3.11
        with self._shares.changed:
            if self._shares.opening + self._shares.committed == 0:
                self._shares.done = False
            self._shares.opening += 1
        return self

    def __exit__(self, *_: object) -> None:
        with self._shares.changed:
            self._shares.opening -= not self._committed
            self._shares.committed -= self._committed
            self._shares.changed.notify_all()

    def take_on(self) -> None:
        """It has a connection."""
        with self._shares.changed:
            self._shares.opening -= not self._committed
            self._shares.committed += not self._committed
            self._committed = True
            self._shares.changed.notify_all()

    def all_done(self) -> None:
        """There was nothing left to take."""
        with self._shares.changed:
            self._shares.done = True

    def others_do_it(self) -> bool:
        """Whether this thread, which could not connect and has taken nothing, may go; waits for what the others get."""
        shares = self._shares
        if self._committed:
            return False
        with shares.changed:
            shares.opening -= 1
            shares.changed.notify_all()
            shares.changed.wait_for(lambda: shares.done or shares.committed or not shares.opening)
            shares.opening += 1
            return shares.done or shares.committed > 0


def _parts_of(manifest: Manifest, index: Index) -> list[int]:
    """The manifest's part behind each pack of the index. Raises ImageCorrupt where they do not fit."""
    numbers = {part.path: number for number, part in enumerate(manifest.parts)}
    found = []
    for pack in index.packs:
        number = numbers.get(f"packs/{pack.file}")
        if number is None or manifest.parts[number].size != pack.size:
            raise ImageCorrupt(
                f"packs/{pack.file} is not in the manifest as the index says", "do not restore this image"
            )
        found.append(number)
    return found

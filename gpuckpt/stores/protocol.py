"""What a place for images can do, whichever it is: this host's directories, a host with gpuckpt, a bare SFTP host.

A transfer moves *pieces*: parts of an image cut at fixed places, so that any connection can carry any piece,
and what has arrived can be named after a crash. A store that takes an image in (an *arrival*) keeps it in
NAME.partial until every part was verified against the manifest, and then renames it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeVar, runtime_checkable

from gpuckpt.model.errors import Refused
from gpuckpt.model.records import dataclass

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from gpuckpt.model.manifest import Manifest, Part
    from gpuckpt.stores.directory import Admit
    from gpuckpt.system.extents import Extent

    Ticker = Callable[[int, int], None]
    """Called with (bytes done, bytes in all) while something long goes on; may raise to end it."""

PIECE_BYTES = 4 << 20
FRAME_SURPLUS_BYTES = 16
"""An encrypted frame is longer than its content by its tag, and is read at once."""


class IsSeries(Refused):
    """An image was asked for, and a directory of several was named."""

    def __init__(self, message: str, hint: str, newest: str) -> None:
        """`newest`: the name of the newest image in it."""
        super().__init__(message, hint)
        self.newest = newest


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a part."""

    part: int
    """Index into the manifest's parts."""
    number: int
    size: int

    @property
    def offset(self) -> int:
        """Where it begins in its part, in bytes."""
        return self.number * PIECE_BYTES


@dataclass(frozen=True, slots=True)
class Span:
    """Any stretch of a part, at most PIECE_BYTES and FRAME_SURPLUS_BYTES long."""

    part: int
    """Index into the manifest's parts."""
    offset: int
    size: int


Stretch = TypeVar("Stretch", Piece, Span)
"""What can be read at once."""


def pieces_of(number: int, part: Part) -> Iterator[Piece]:
    """All pieces of a part; an empty part has one, of no bytes."""
    for index in range(count_pieces(part.size)):
        yield Piece(number, index, min(PIECE_BYTES, part.size - index * PIECE_BYTES))


def count_pieces(size: int) -> int:
    """How many pieces a part of `size` bytes has."""
    return max(1, -(-size // PIECE_BYTES))


class Reader(Protocol):
    """One stream out of an image; for one thread."""

    def stream(self, pieces: Iterator[Stretch]) -> Iterator[tuple[Stretch, memoryview]]:
        """Each piece and its bytes, which hold good until the next. Raises LinkLost, OSError, GpuckptError."""

    def close(self) -> None:
        """Give it back."""

    def cut(self) -> None:
        """End it from another thread: what waits in it raises LinkLost."""


@runtime_checkable
class InFiles(Protocol):
    """A reader whose pieces lie in files of this host."""

    def extent(self, piece: Piece) -> Extent:
        """Where a piece lies, until the next is asked for. Raises OSError, GpuckptError."""


class Offer(Protocol):
    """An image that can be read."""

    raw_manifest: bytes
    manifest: Manifest
    signature: bytes
    """Of the manifest; b'' where it has none."""

    @property
    def path(self) -> str:
        """Where it lies; of DIR/latest the image that this leads to. '' where the other side does not say."""

    def open_reader(self) -> Reader:
        """Another stream. Raises LinkLost, GpuckptError."""

    def verify(self, tick: Ticker) -> str:
        """Read every byte where it lies; says by what it was verified. Raises ImageCorrupt."""

    def close(self) -> None:
        """Let the image go."""


class Writer(Protocol):
    """One stream into an arrival; for one thread."""

    def send(self, piece: Piece, content: memoryview) -> Iterable[Piece]:
        """Take a piece; returns those that have arrived meanwhile. Raises LinkLost, OSError, GpuckptError."""

    def drain(self) -> Iterable[Piece]:
        """Wait until all that was sent has arrived."""

    def close(self) -> None:
        """Give it back."""

    def cut(self) -> None:
        """End it from another thread: what waits in it raises LinkLost."""


@runtime_checkable
class TakesExtents(Protocol):
    """A writer that would rather have the kernel send what lies in a file of this host."""

    def send_extent(self, piece: Piece, extent: Extent) -> Iterable[Piece]:
        """As `send`."""


class Arrival(Protocol):
    """An image on its way in. Only one at a time: its maker holds it until `publish` or `close`."""

    already: bool
    """The very same image stands there complete: nothing is to be sent."""
    place: str
    """Where it will stand, absolute."""

    def held(self) -> dict[int, Sequence[tuple[int, int]]]:
        """What is there already: part -> ranges of piece numbers, ends excluded."""

    def open_writer(self) -> Writer:
        """Another stream. Raises LinkLost, GpuckptError."""

    def verify(self, tick: Ticker) -> Sequence[int]:
        """Compare every byte with the manifest; the parts that do not fit are dropped there and returned."""

    def publish(self) -> str:
        """Sync and rename; says by what it was verified. Raises Refused, LinkLost, OSError."""

    def close(self) -> None:
        """Let it go; what has arrived stays for the next try."""


class Store(Protocol):
    """A place for images. Paths are texts; bytes that are no text survive as surrogates."""

    why: str
    """Why nothing better is used; empty where this is the best."""

    def offer(self, path: str, admit: Admit | None = None) -> Offer:
        """Open an image for reading, once `admit` has let it pass.

        Raises NotFound, ImageCorrupt, ImageTooNew, Busy, Refused, LinkLost, and what `admit` raises.
        """

    def receive(self, path: str, raw_manifest: bytes, source: Offer | None = None) -> Arrival:
        """Begin or go on with taking an image in as `path`; `source` has its signature, and can be read to compare.

        Raises Busy, Refused, NotFound, ImageCorrupt, LinkLost, OSError.
        """

    def keep_alive(self) -> None:
        """To be called every few seconds, by any thread. Raises LinkLost."""

    def round_trip_seconds(self) -> float:
        """How long a question and its answer take; 0 where nobody is asked."""

    def close(self) -> None:
        """Let the other side go."""

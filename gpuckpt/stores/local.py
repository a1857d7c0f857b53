"""Directories of this host as a store."""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from gpuckpt.model.errors import ImageCorrupt, Refused
from gpuckpt.stores import directory
from gpuckpt.stores.landing import VERIFIED, DirectoryArrival
from gpuckpt.system.extents import Extent

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gpuckpt.model.manifest import Manifest, Part
    from gpuckpt.stores.protocol import Offer, Piece, Span, Stretch, Ticker


class HasParts(Protocol):
    """What pieces are read from."""

    @property
    def manifest(self) -> Manifest:
        """What it holds."""
        ...

    def part(self, name: str) -> Path:
        """Where a part lies."""
        ...


class DirectoryStore:
    """Images in directories of this host."""

    why = ""

    def offer(self, path: str, admit: directory.Admit | None = None) -> DirectoryOffer:
        """Open an image for reading."""
        return DirectoryOffer(directory.open_image(Path(path), admit))

    def receive(self, path: str, raw_manifest: bytes, source: Offer | None = None) -> DirectoryArrival:
        """Begin or go on with taking an image in."""
        return DirectoryArrival(Path(path), raw_manifest, signature=source.signature if source is not None else b"")

    def round_trip_seconds(self) -> float:
        """Nobody is asked."""
        return 0.0

    def keep_alive(self) -> None:
        """Nobody waits."""

    def close(self) -> None:
        """Nothing is held."""


class DirectoryOffer:
    """An image of this host, held open."""

    def __init__(self, image: directory.Image) -> None:
        self.image = image
        self.path = str(image.path)
        self.manifest = image.manifest
        self.signature = image.signature
        self.raw_manifest = os.pread(image.lock_fd, os.fstat(image.lock_fd).st_size, 0)

    def open_reader(self) -> DirectoryReader:
        """Another stream."""
        return DirectoryReader(self.image)

    def verify(self, tick: Ticker) -> str:
        """Read every byte."""
        total = directory.sizes(self.manifest.parts)
        directory.verify(self.image, lambda: tick(0, total))
        return VERIFIED

    def close(self) -> None:
        """Let the image go."""
        self.image.close()


class DirectoryReader:
    """Reads pieces of an image into one buffer."""

    MOST_OPEN = 16

    def __init__(self, image: HasParts) -> None:
        self._image = image
        self._open: dict[int, int] = {}
        self._buffer = bytearray()

    def stream(self, pieces: Iterator[Stretch]) -> Iterator[tuple[Stretch, memoryview]]:
        """Each piece and its bytes."""
        for piece in pieces:
            yield piece, self.read(piece)

    def read(self, piece: Piece | Span) -> memoryview:
        """The bytes of one piece, until the next is read. Raises ImageCorrupt, Refused, OSError."""
        lies = self.extent(piece)
        if len(self._buffer) < piece.size:
            self._buffer = bytearray(piece.size)
        view = memoryview(self._buffer)[: piece.size]
        if os.preadv(lies.descriptor, [view], lies.offset) != piece.size:
            raise self._shorter(piece)
        return view

    def extent(self, piece: Piece | Span) -> Extent:
        """Where the bytes of one piece lie, until the next is asked for. Raises ImageCorrupt, Refused, OSError."""
        parts = self._image.manifest.parts
        if not (
            0 <= piece.part < len(parts) and piece.offset >= 0 and piece.offset + piece.size <= parts[piece.part].size
        ):
            raise Refused("a piece that does not lie in the image was asked for", "ask for what its manifest names")
        descriptor = self._descriptor(piece.part, parts[piece.part])
        if os.fstat(descriptor).st_size < piece.offset + piece.size:
            raise self._shorter(piece)
        return Extent(descriptor, piece.offset, piece.size)

    def _shorter(self, piece: Piece | Span) -> ImageCorrupt:
        name = self._image.manifest.parts[piece.part].path
        return ImageCorrupt(f"part {name} is shorter than the manifest says", "dump again")

    def _descriptor(self, index: int, part: Part) -> int:
        if index in self._open:
            return self._open[index]
        if len(self._open) >= self.MOST_OPEN:
            os.close(self._open.pop(next(iter(self._open))))
        self._open[index] = _open_part(self._image, part)
        return self._open[index]

    def close(self) -> None:
        """Close the files."""
        for descriptor in self._open.values():
            with contextlib.suppress(OSError):
                os.close(descriptor)
        self._open = {}

    def cut(self) -> None:
        """A read from a file ends by itself."""


def _open_part(image: HasParts, part: Part) -> int:
    path = image.part(part.path)
    if directory.has_link(path, part.path):
        raise ImageCorrupt(f"part {part.path} is reached through a link", "do not use this image")
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise ImageCorrupt(f"part {part.path} cannot be read: {error.strerror}", "dump again") from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ImageCorrupt(f"part {part.path} is no regular file", "do not use this image")
    return descriptor

"""Writing pieces into an arrival of this host: by its own process, and by those of further connections."""

from __future__ import annotations

import contextlib
import hmac
import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING

from gpuckpt.model import manifest as manifests
from gpuckpt.model.errors import ImageCorrupt, Refused
from gpuckpt.stores import directory
from gpuckpt.stores.journal import RECORD, digest_bytes
from gpuckpt.stores.protocol import Piece

if TYPE_CHECKING:
    from collections.abc import Iterable

    from gpuckpt.model.manifest import Manifest, Part

INCOMING, TOKEN, JOURNAL = "incoming", "token", "journal"
OWN = frozenset({INCOMING, TOKEN, JOURNAL})


class DirectoryWriter:
    """Writes pieces into the arrival of this host that knows `token`, in this process or another."""

    MOST_OPEN = 16

    def __init__(self, target: Path, manifest: Manifest | None, token: str) -> None:
        """Raises Refused where another arrival has begun meanwhile."""
        self._path = partial_path(target)
        if not hmac.compare_digest(read_own(self._path / TOKEN), token.encode()):
            raise Refused(f"{self._path} belongs to another transfer by now", "begin again")
        self._manifest = manifest or decoded(read_own(self._path / INCOMING))
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        self._journal = os.open(self._path / JOURNAL, flags, 0o600)
        self._open: dict[int, int] = {}

    def send(self, piece: Piece, content: memoryview) -> Iterable[Piece]:
        """Write a piece, whose bytes the caller has verified."""
        part = self._part(piece, len(content))
        descriptor = self._descriptor(piece.part, part)
        at, rest = piece.offset, content
        while rest:
            written = os.pwrite(descriptor, rest, at)
            at, rest = at + written, rest[written:]
        os.write(self._journal, RECORD.pack(digest_bytes(part), piece.number))
        return (piece,)

    def _part(self, piece: Piece, size: int) -> Part:
        parts = self._manifest.parts
        if not 0 <= piece.part < len(parts):
            raise Refused("a piece of a part that the manifest does not name", "do not trust the sender")
        part = parts[piece.part]
        if piece.number < 0 or piece.offset + size > part.size or piece.size != size:
            raise Refused("a piece that does not lie in its part", "do not trust the sender")
        return part

    def _descriptor(self, index: int, part: Part) -> int:
        if index in self._open:
            return self._open[index]
        if len(self._open) >= self.MOST_OPEN:
            os.close(self._open.pop(next(iter(self._open))))
        # By its path: once the image is published there is no such path, and nothing can be written to it any more.
        flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        descriptor = os.open(self._path / part.path, flags, 0o600)
        seen = os.fstat(descriptor)
        if seen.st_nlink != 1 or not stat.S_ISREG(seen.st_mode):
            os.close(descriptor)
            raise Refused(f"{part.path} is shared with another image and is not to be written", "begin again")
        self._open[index] = descriptor
        return descriptor

    def drain(self) -> Iterable[Piece]:
        """All has arrived."""
        return ()

    def close(self) -> None:
        """Close the files."""
        for descriptor in (*self._open.values(), self._journal):
            with contextlib.suppress(OSError):
                os.close(descriptor)
        self._open = {}
        self._journal = -1

    def cut(self) -> None:
        """A write to a file ends by itself."""


def decoded(raw: bytes) -> Manifest:
    """The manifest of an image that arrives. Raises ImageCorrupt, also for parts that would be in our way."""
    manifest = manifests.decode(raw, manifests.NAME)
    for part in manifest.parts:
        digest_bytes(part)
        if part.path in directory.NOT_DIGESTED or part.path.split("/")[0].removesuffix(".new") in OWN:
            raise ImageCorrupt(f"the part path {part.path[:200]!r} is not allowed", "do not take this image in")
    return manifest


def partial_path(target: Path) -> Path:
    """Where an image lies until it is whole."""
    return target.with_name(target.name + directory.PARTIAL_SUFFIX)


def read_own(path: Path) -> bytes:
    """A small file of ours; empty where there is none."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return b""
    with os.fdopen(descriptor, "rb") as file:
        return file.read(manifests.MAX_BYTES + 1)


def write_own(path: Path, content: bytes) -> None:
    """Replace a small file of ours in one step."""
    new = path.with_name(path.name + ".new")
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
    new.replace(path)

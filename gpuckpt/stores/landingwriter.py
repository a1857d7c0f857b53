"""Writing pieces into an arrival of this host: by its own process, and by those of further connections."""

from __future__ import annotations

import contextlib
import hmac
import os
import stat
import struct
from pathlib import Path
from typing import TYPE_CHECKING

import blake3

from gpuckpt.model import manifest as manifests
from gpuckpt.model.errors import ImageCorrupt, Refused
from gpuckpt.stores import directory, partialimage
from gpuckpt.stores.journal import RECORD, digest_bytes
from gpuckpt.stores.protocol import Piece

if TYPE_CHECKING:
    from collections.abc import Iterable

    from gpuckpt.model.manifest import Manifest, Part

INCOMING, TOKEN, JOURNAL, COMPARED = "incoming", "token", "journal", "compared"
OWN = frozenset({INCOMING, TOKEN, JOURNAL, COMPARED})
_COMPARED = struct.Struct(">32sQQ")
"""A pack's digest, and which file it was at which change of it (inode, ctime in ns)."""


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
        self._compared = os.open(self._path / COMPARED, flags, 0o600)
        self._open: dict[int, int] = {}
        self._pack: _Arriving | None = None

    def send(self, piece: Piece, content: memoryview) -> Iterable[Piece]:
        """Write a piece, whose bytes the caller has verified."""
        part = self._part(piece, len(content))
        descriptor = self._descriptor(piece.part, part)
        at, rest = piece.offset, content
        while rest:
            written = os.pwrite(descriptor, rest, at)
            at, rest = at + written, rest[written:]
        os.write(self._journal, RECORD.pack(digest_bytes(part), piece.number))
        if is_pack(part):
            self._compare(piece, part, content, descriptor)
        return (piece,)

    def _compare(self, piece: Piece, part: Part, content: memoryview, descriptor: int) -> None:
        """A pack that comes front to back is hashed as it does, and noted where it fits: `verify` need not read it.

        Only packs: their name is their digest, so that whoever else writes here by it writes the same.
        """
        if piece.number == 0:
            self._pack = _Arriving(piece.part)
        if self._pack is not None and not self._pack.takes(piece, content):
            self._pack = None
        if self._pack is not None and self._pack.size == part.size:
            if self._pack.hasher.digest() == digest_bytes(part):
                os.write(self._compared, _as_it_lies(part, os.fstat(descriptor)))
            self._pack = None

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
        for descriptor in (*self._open.values(), self._journal, self._compared):
            with contextlib.suppress(OSError):
                os.close(descriptor)
        self._open = {}
        self._journal = self._compared = -1

    def cut(self) -> None:
        """A write to a file ends by itself."""


class _Arriving:
    """A pack that has come front to back so far."""

    def __init__(self, index: int) -> None:
        self._index = index
        self.size = 0
        self.hasher = blake3.blake3()

    def takes(self, piece: Piece, content: memoryview) -> bool:
        """Hash what comes next; False where it is something else."""
        if (piece.part, piece.offset) != (self._index, self.size):
            return False
        self.hasher.update(content)
        self.size += len(content)
        return True


def is_pack(part: Part) -> bool:
    """A part that is named by its digest."""
    return part.path == f"packs/{part.blake3}.zst"


def _as_it_lies(part: Part, seen: os.stat_result) -> bytes:
    return _COMPARED.pack(digest_bytes(part), seen.st_ino, seen.st_ctime_ns)


def compared_packs(path: Path, parts: Iterable[Part]) -> frozenset[str]:
    """The paths of packs that were compared as they came, in this arrival, and that nobody has touched since."""
    raw = read_own(path / COMPARED)
    noted = {raw[at : at + _COMPARED.size] for at in range(0, len(raw), _COMPARED.size)}
    found = set()
    for part in parts if noted else ():
        with contextlib.suppress(OSError):
            if is_pack(part) and _as_it_lies(part, (path / part.path).lstat()) in noted:
                found.add(part.path)
    return frozenset(found)


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
    return target.with_name(target.name + partialimage.PARTIAL_SUFFIX)


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

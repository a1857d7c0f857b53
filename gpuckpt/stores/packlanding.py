"""Packs that arrive while their image is still being made: before its manifest, each front to back on one connection.

They grow as NAME.partial/packs/TOKEN-N.part; one that is complete and fits gets its name, and the journal of the
arrival (stores/landing.py) its pieces, so that `begin` finds it there. Without `begin` nothing of it stays.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import blake3

from gpuckpt.model.errors import Refused, TransferFailed
from gpuckpt.stores.journal import RECORD
from gpuckpt.stores.landing import claim, require_parent
from gpuckpt.stores.landingwriter import JOURNAL, TOKEN, partial_path, read_own, write_own
from gpuckpt.stores.protocol import PIECE_BYTES, count_pieces

if TYPE_CHECKING:
    from collections.abc import Callable

    from gpuckpt.stores.partialimage import PartialImage

    Answer = tuple[dict[str, Any], bytes]


class PackLanding:
    """The place of an image that will arrive: its maker holds it until `begin`."""

    def __init__(self, target: Path) -> None:
        """Raises Busy, Refused, NotFound, OSError."""
        if os.path.lexists(target):
            raise Refused(f"{target} exists already", "choose another directory, or remove it")
        require_parent(target)
        self.token = secrets.token_hex(16)
        self._partial: PartialImage | None = claim(target)
        for place in self._partial.path.iterdir():
            shutil.rmtree(place) if place.is_dir() and not place.is_symlink() else place.unlink()
        (self._partial.path / "packs").mkdir(mode=0o700)
        write_own(self._partial.path / TOKEN, self.token.encode())

    def hand_over(self) -> None:
        """What has arrived stays, for `begin`, which locks it again."""
        if self._partial is not None:
            os.close(self._partial.lock_fd)
            self._partial = None

    def close(self) -> None:
        """The image will not come."""
        if self._partial is not None:
            self._partial.discard()
            self._partial = None


class PackInlet:
    """One connection's pack."""

    def __init__(self, target: Path, token: str) -> None:
        """Raises Refused, OSError."""
        self._root = partial_path(target)
        if not token or not secrets.compare_digest(read_own(self._root / TOKEN), token.encode()):
            raise Refused(f"{self._root} belongs to another transfer by now", "begin again")
        self._path = self._root / "packs" / f"{secrets.token_hex(8)}.part"
        self._descriptor = os.open(
            self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600
        )
        self._hasher = blake3.blake3()
        self._size = 0

    def write(self, at: int, content: memoryview) -> None:
        """Append. Raises TransferFailed, OSError."""
        if at != self._size:
            raise TransferFailed("a pack came in another order than it was made", "repeat the command")
        self._hasher.update(content)
        rest = content
        while rest:
            rest = rest[os.write(self._descriptor, rest) :]
        self._size += len(content)

    def finish(self, digest: str, size: int) -> None:
        """Give it its name. Raises TransferFailed, OSError."""
        if (self._hasher.hexdigest(), self._size) != (digest, size):
            raise TransferFailed("a pack arrived damaged", "repeat the command")
        self._path.rename(self._path.with_name(f"{digest}.zst"))
        self.close()
        records = b"".join(RECORD.pack(bytes.fromhex(digest), number) for number in range(count_pieces(size)))
        journal = os.open(
            self._root / JOURNAL, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600
        )
        try:
            os.write(journal, records)
        finally:
            os.close(journal)

    def close(self) -> None:
        """Close it; one that is not complete goes with its directory, or at `begin`."""
        with contextlib.suppress(OSError):
            os.close(self._descriptor)
        self._descriptor = -1


class PackQuestions:
    """What a serving gpuckpt answers about packs."""

    def __init__(self, path_of: Callable[[dict[str, Any]], str]) -> None:
        self._path_of = path_of
        self._landing: PackLanding | None = None
        self._inlet: PackInlet | None = None
        self.handlers = {
            "packs": self._begin,
            "pack-join": self._join,
            "pack-write": self._write,
            "pack-finish": self._finish,
        }
        self.most_payload = {"pack-write": PIECE_BYTES}

    def hand_over(self) -> bool:
        """`begin` comes; whether on the connection of `packs`: then nobody will go on with what is broken off."""
        if self._landing is None:
            return False
        self._landing.hand_over()
        self._landing = None
        return True

    def close(self) -> None:
        """The connection has ended."""
        for held in (self._inlet, self._landing):
            if held is not None:
                held.close()
        self._landing = self._inlet = None

    def _begin(self, header: dict[str, Any], _payload: memoryview) -> Answer:
        if self._landing is not None:
            raise Refused("this connection takes packs in already", "use another one")
        self._landing = PackLanding(Path(self._path_of(header)))
        return {"token": self._landing.token}, b""

    def _join(self, header: dict[str, Any], _payload: memoryview) -> Answer:
        if self._inlet is not None:
            raise Refused("this connection takes a pack in already", "use another one")
        self._inlet = PackInlet(Path(self._path_of(header)), str(header["token"]))
        return {"ok": True}, b""

    def _write(self, header: dict[str, Any], payload: memoryview) -> Answer:
        self._the_inlet().write(int(header["at"]), payload)
        return {"ok": True}, b""

    def _finish(self, header: dict[str, Any], _payload: memoryview) -> Answer:
        self._the_inlet().finish(str(header["b3"]), int(header["size"]))
        return {"ok": True}, b""

    def _the_inlet(self) -> PackInlet:
        if self._inlet is None:
            raise Refused("no pack is taken in here", "join first")
        return self._inlet

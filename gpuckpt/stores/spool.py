"""An image under work that is sent away before it is one: a migration's, which may never be published here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpuckpt.stores import directory
from gpuckpt.stores.local import DirectoryReader

if TYPE_CHECKING:
    from pathlib import Path

    from gpuckpt.model.manifest import Manifest
    from gpuckpt.stores.protocol import Ticker


@dataclass(slots=True)
class SpoolOffer:
    """Its parts are complete; nobody else has it."""

    root: Path
    raw_manifest: bytes
    manifest: Manifest
    signature: bytes = b""

    @property
    def path(self) -> str:
        """Where it lies."""
        return str(self.root)

    def part(self, name: str) -> Path:
        """The path of a part."""
        return self.root / name

    def open_reader(self) -> DirectoryReader:
        """Another stream."""
        return DirectoryReader(self)

    def verify(self, tick: Ticker) -> str:
        """Read every byte. Raises ImageCorrupt."""
        total = directory.sizes(self.manifest.parts)
        for part in self.manifest.parts:
            directory.verify_part(self.part(part.path), part, lambda: tick(0, total))
        return "BLAKE3 of every byte"

    def close(self) -> None:
        """Whoever made it removes it."""

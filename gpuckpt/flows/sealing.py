"""A dump whose image is encrypted: its keys, and what becomes of each file before the image is published.

CRIU's small files and captured files lie in a secret place (in memory) while they are looked at, and reach the disk
sealed. Packs are encrypted frame by frame as they are written (images/captureworker.py).
"""

from __future__ import annotations

import io
import os
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import blake3

from gpuckpt.flows import secretplace
from gpuckpt.images import keys
from gpuckpt.images.sealing import KEY_BYTES, ImageKey
from gpuckpt.model import manifest as manifests
from gpuckpt.model.manifest import Part
from gpuckpt.model.redacted import SEALED, redacted
from gpuckpt.system.files import open_plain

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from gpuckpt.flows.secretplace import SecretPlace
    from gpuckpt.model.manifest import Manifest
    from gpuckpt.stores.partialimage import PartialImage


@dataclass(slots=True)
class Sealing:
    """The encryption of one image."""

    recipients: tuple[str, ...]
    image_id: str = field(default_factory=lambda: os.urandom(16).hex())
    digest_key: bytes = field(default_factory=lambda: os.urandom(KEY_BYTES), repr=False)
    """A base's, where packs are taken over from one."""
    _secret: bytes = field(default_factory=lambda: os.urandom(KEY_BYTES), repr=False)
    _place: SecretPlace | None = None

    @classmethod
    def of(cls, recipients: tuple[str, ...]) -> Sealing | None:
        """None where nothing is encrypted. Raises UsageError for what is no recipient."""
        return cls(keys.recipients(recipients)) if recipients else None

    def hide(self, partial: PartialImage, run_directory: Path) -> PartialImage:
        """The same image, its small files in memory. Raises MachineLacks, OSError."""
        self._place = secretplace.make()
        self._place.belongs_to(run_directory)
        hidden = replace(partial, secret=self._place.path)
        hidden.criu.mkdir(mode=0o700)
        return hidden

    def close(self) -> None:
        """Nothing of it stays in clear."""
        if self._place is not None:
            self._place.remove()

    def seal(self, partial: PartialImage, parts: Iterable[Part], going_on: Callable[[], None]) -> tuple[Part, ...]:
        """Write the hidden files of an image into it. Returns what lies there, packs as they are. Raises OSError."""
        return tuple(
            self._sealed_file(partial, part.path, going_on) if (partial.hidden / part.path).is_file() else part
            for part in parts
        )

    def _sealed_file(self, partial: PartialImage, name: str, going_on: Callable[[], None]) -> Part:
        source = partial.hidden / name
        (partial.path / name).parent.mkdir(mode=0o700, exist_ok=True)
        with os.fdopen(open_plain(source), "rb") as content:
            part = self._write(partial, name, content, going_on)
        if name.startswith("files/"):
            source.unlink()  # it may be large, and nobody looks at it again
        return part

    def seal_bytes(self, partial: PartialImage, name: str, content: bytes) -> Part:
        """Write a file of the image. Raises OSError."""
        return self._write(partial, name, io.BytesIO(content), lambda: None)

    def _write(
        self, partial: PartialImage, name: str, content: io.BufferedReader | io.BytesIO, going_on: Callable[[], None]
    ) -> Part:
        with _new_file(partial.path / name) as target:
            written = ImageKey(self._secret, self.image_id).seal(name, content, target, going_on)
            target.flush()
            os.fsync(target.fileno())
        return Part(name, written.size, written.blake3)

    def manifest(self, partial: PartialImage, manifest: Manifest, parts: tuple[Part, ...]) -> Manifest:
        """Seal the whole manifest and wrap the image key; returns the open one. Raises OSError, ImageCorrupt."""
        wrapped = keys.wrap(self._secret, self.recipients)
        with _new_file(partial.path / keys.FILE) as target:
            target.write(wrapped)
            target.flush()
            os.fsync(target.fileno())
        key = Part(keys.FILE, len(wrapped), blake3.blake3(wrapped).hexdigest())
        raw = manifests.encode(manifest)
        manifests.decode(raw, SEALED)  # what cannot be read again may not be called an image
        sealed = self.seal_bytes(partial, SEALED, raw)
        return redacted(manifest, tuple(sorted((*parts, key, sealed), key=lambda part: part.path)))


def _new_file(path: Path) -> io.BufferedWriter:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    return os.fdopen(descriptor, "wb")

"""An encrypted image as those see it who have its key: its small files in clear, in memory; its packs where they lie.

    manifest read, signature judged -> key.age opened by the identity -> manifest.sealed, which must be of this image
    and name the same parts -> small files into a secret place, each of the size and digest that it says

Frames are decrypted as they are read (images/decoding.py), with the keys that stand in the index.
"""

from __future__ import annotations

import contextlib
import io
import os
from typing import TYPE_CHECKING

from gpuckpt.flows import secretplace
from gpuckpt.images import keys, packindex
from gpuckpt.images.packs import PackReader
from gpuckpt.images.sealing import ImageKey
from gpuckpt.model import manifest as manifests
from gpuckpt.model.errors import ImageCorrupt, MachineLacks, Refused
from gpuckpt.model.records import dataclass
from gpuckpt.model.redacted import ENCRYPTED, OWN, SEALED, is_encrypted
from gpuckpt.stores import directory
from gpuckpt.stores.directory import Image
from gpuckpt.system.files import open_plain

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from gpuckpt.flows.secretplace import SecretPlace
    from gpuckpt.images.packindex import Index
    from gpuckpt.model.manifest import Manifest
    from gpuckpt.stores.directory import Admit

NOT_THIS = "do not restore this image"
PACKS = "packs/"
LOG = "criu-dump.log"
MAX_LOG_BYTES = 64 << 20
INDEX = f"{PACKS}{packindex.NAME}"


@dataclass(frozen=True, slots=True)
class View:
    """An image to work with. `stored` is what lies in its directory; `image` the same in clear."""

    stored: Image
    image: Image
    place: SecretPlace | None = None

    @property
    def is_plain(self) -> bool:
        """Whether it is not encrypted."""
        return not is_encrypted(self.stored.manifest)

    @property
    def is_open(self) -> bool:
        """Whether all of it can be read."""
        return self.place is not None or self.is_plain

    def open_packs(self, index: Index) -> PackReader:
        """Its frames. Raises ImageCorrupt."""
        return PackReader(self.stored.part("packs"), index)

    def belongs_to(self, run_directory: Path) -> None:
        """Whoever ends that run after a crash removes what lies in clear. Raises OSError."""
        if self.place is not None:
            self.place.belongs_to(run_directory)

    def let_go(self) -> None:
        """Only the manifest is still needed: nothing of it stays in clear, however long the job is waited for."""
        if self.place is not None:
            self.place.empty()

    def close(self) -> None:
        """Let it go: nothing of it stays in clear."""
        if self.place is not None:
            self.image.close()
            self.place.remove()
        self.stored.close()


def open_image(path: Path, admit: Admit | None, identity: Path | None, *, at_hand: bool = False) -> View:
    """Open an image to use it. Raises as stores/directory.py does, and as `opened`.

    `at_hand`: the identity was not named for this image, which may be one that is not encrypted.
    """
    stored = directory.open_image(path, admit)
    try:
        return opened(stored, None if at_hand and not is_encrypted(stored.manifest) else identity)
    except BaseException:
        stored.close()
        raise


def opened(stored: Image, identity: Path | None, going_on: Callable[[], None] = lambda: None) -> View:
    """An image as it can be used; one that is not encrypted as it is.

    Raises Refused without the right identity, and with one for an image that is not encrypted; ImageCorrupt,
    MachineLacks, and what `going_on` raises. `stored` is then still the caller's.
    """
    if not is_encrypted(stored.manifest):
        if identity is not None:
            raise Refused(
                f"{stored.path} is not encrypted, and an --identity was given to open it",
                "is it the right image? If it is, leave --identity out",
            )
        return View(stored, stored)
    if identity is None:
        raise Refused(f"{stored.path} is encrypted", "name the key of one of its recipients: --identity FILE")
    key = image_key(stored, identity)
    manifest = _manifest(stored, key)
    place = secretplace.make()
    try:
        for part in manifest.parts:
            if not _is_pack(part.path):
                _unseal(stored, key, part, place.path, going_on)
        _unseal_log(stored, key, place.path)
        directory_fd = os.open(place.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        return View(stored, Image(stored.path, manifest, os.dup(stored.lock_fd), directory_fd), place)
    except OSError as error:
        place.remove()
        raise MachineLacks(
            f"the small files of {stored.path} do not fit into memory: {error.strerror}", "make /dev/shm larger"
        ) from None
    except BaseException:
        place.remove()
        raise


def image_key(stored: Image, identity: Path) -> ImageKey:
    """The key of an encrypted image. Raises Refused, NotFound, ImageCorrupt."""
    raw = _read(stored, keys.FILE, keys.MAX_BYTES + 1)
    return ImageKey(keys.unwrap(raw, identity), stored.manifest.image_id)


def read_index(stored: Image, key: ImageKey) -> Index:
    """The index of its packs, with their keys; nothing of it is written anywhere. Raises ImageCorrupt, ImageTooNew."""
    raw = _open(stored, key, INDEX, packindex.MAX_INDEX_BYTES)
    return packindex.decode(raw, str(stored.path / INDEX))


def why_not_shared(base: Manifest, identity: Path | None, *, encrypted: bool) -> str:
    """Why a dump takes nothing over from a base; '' when it can. An encrypted pack is of use in no other image."""
    if "packs" not in base.requires:
        return "it was made with --plain"
    if is_encrypted(base) != encrypted:
        return "it is encrypted, and this image is not" if is_encrypted(base) else "it is not encrypted"
    return "it is encrypted, and no --identity was given" if encrypted and identity is None else ""


def _manifest(stored: Image, key: ImageKey) -> Manifest:
    """The whole manifest. Raises ImageCorrupt where it is not that of this image."""
    where = stored.path / SEALED
    manifest = manifests.decode(_open(stored, key, SEALED, manifests.MAX_BYTES), str(where))
    there = {part.path: part for part in stored.manifest.parts if part.path not in OWN}
    packs_fit = all(there.get(part.path) == part for part in manifest.parts if _is_pack(part.path))
    features = {*manifest.requires, ENCRYPTED}
    same = (manifest.image_id, features) == (stored.manifest.image_id, {*stored.manifest.requires})
    if not same or not packs_fit or {part.path for part in manifest.parts} != set(there):
        raise ImageCorrupt(f"{where} is of another image than {manifests.NAME}", NOT_THIS)
    if manifest.tree.ids != stored.manifest.tree.ids:
        raise ImageCorrupt(f"{where} holds other processes than {manifests.NAME}", NOT_THIS)
    return manifest


def _is_pack(path: str) -> bool:
    return path.startswith(PACKS) and path != INDEX


def _open(stored: Image, key: ImageKey, name: str, most: int) -> bytes:
    clear = io.BytesIO()
    key.open(name, io.BytesIO(_read(stored, name, 2 * most)), clear, lambda: None)
    return clear.getvalue()


def _read(stored: Image, name: str, most: int) -> bytes:
    try:
        with os.fdopen(open_plain(stored.part(name)), "rb") as file:
            return file.read(most)
    except OSError as error:
        raise ImageCorrupt(f"part {name} cannot be read: {error.strerror}", "copy the image again") from None


def _unseal_log(stored: Image, key: ImageKey, place: Path) -> None:
    """CRIU's log, which is for people only: where it is missing or damaged nothing is lost."""
    with contextlib.suppress(ImageCorrupt):
        (place / LOG).write_bytes(_open(stored, key, LOG, MAX_LOG_BYTES))


def _unseal(stored: Image, key: ImageKey, part: manifests.Part, place: Path, going_on: Callable[[], None]) -> None:
    """Write one file in clear. Raises ImageCorrupt, OSError of the place."""
    try:
        source = open_plain(stored.part(part.path))
    except OSError as error:
        raise ImageCorrupt(f"part {part.path} cannot be read: {error.strerror}", "copy the image again") from None
    target = place / part.path
    with os.fdopen(source, "rb") as sealed:
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with os.fdopen(os.open(target, flags, 0o600), "wb") as clear:
            written = key.open(part.path, sealed, clear, going_on)
    if (written.size, written.blake3) != (part.size, part.blake3):
        raise ImageCorrupt(f"part {part.path} is another one than {SEALED} says", NOT_THIS)

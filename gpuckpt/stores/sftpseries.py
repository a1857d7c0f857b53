"""The images of a directory on a bare SFTP host, as their manifests and the sizes of their files tell.

What only that host's disk knows stays unknown: what images share, and so what each of them adds. A hostile host can
make names and manifests without end: the newest images are looked at, so many and so many bytes of manifests.
"""

from __future__ import annotations

import os
import posixpath
from pathlib import Path
from typing import TYPE_CHECKING

from gpuckpt.model import manifest as manifests
from gpuckpt.model import series
from gpuckpt.model.errors import GpuckptError
from gpuckpt.model.records import dataclass
from gpuckpt.stores import protection
from gpuckpt.stores.partialimage import PARTIAL_SUFFIX
from gpuckpt.stores.series import OF_AN_IMAGE, Found, describe, missing_part
from gpuckpt.stores.sftp import SftpOffer, latest_in

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from gpuckpt.model.inspection import Copy
    from gpuckpt.model.manifest import Manifest
    from gpuckpt.stores.protocol import Ticker
    from gpuckpt.stores.sftp import SftpStore
    from gpuckpt.system.sftp import Entry, Sftp

MOST_IMAGES = 1000
MOST_MANIFEST_BYTES = 1 << 30
"""Of all images together."""

MOST_FOLDERS = 32
"""An image has three."""


@dataclass(frozen=True, slots=True)
class Seen:
    """A directory of images."""

    latest: str
    images: Sequence[Found]
    left_out: int


def look(store: SftpStore, path: str, going_on: Callable[[], None], verify: Ticker | None = None) -> Seen | None:
    """The images in a directory, or None where it is an image itself, or holds none.

    With `verify` every byte of each is read. Raises LinkLost, and what `going_on` and `verify` raise.
    """
    place = store.absolute(path)
    names = _images_in(store.first, place)
    if not names:
        return None
    found: list[Found] = []
    left_bytes = MOST_MANIFEST_BYTES
    for name in names[:MOST_IMAGES]:
        if left_bytes <= 0:
            break
        going_on()
        one, size = _look(store, place, name, verify)
        found.append(one)
        left_bytes -= size
    return Seen(latest_in(store.first, place), found, len(names) - len(found))


def _images_in(session: Sftp, place: bytes) -> list[str]:
    """Names of whatever is, or should be, an image: newest first, those with other names at the end."""
    try:
        entries = session.names(place)
    except OSError:
        return []  # who opens it as an image says why
    if any(entry.name in (b"criu", manifests.NAME.encode()) for entry in entries):
        return []
    names = [os.fsdecode(entry.name) for entry in entries if entry.is_directory]
    names = sorted(name for name in names if not name.endswith(PARTIAL_SUFFIX))
    members = [name for name in names if series.parse(name) is not None]
    others = [name for name in names if series.parse(name) is None]
    for wanted in OF_AN_IMAGE:
        there = session.exist([posixpath.join(place, os.fsencode(name), wanted.encode()) for name in others])
        others = [name for name, is_there in zip(others, there, strict=True) if is_there]
    return sorted(members, key=lambda name: (series.parse(name) or ("", 0.0))[1], reverse=True) + others


def _look(store: SftpStore, place: bytes, name: str, verify: Ticker | None) -> tuple[Found, int]:
    """An image, and how large its manifest is. What is wrong with it is part of the answer."""
    root, path, size = posixpath.join(place, os.fsencode(name)), Path(os.fsdecode(place)) / name, 0
    try:
        offer = SftpOffer(store, root)
        size = len(offer.raw_manifest)
        damage = missing_part(offer.manifest, _sizes(store.first, root, offer.manifest))
        found = describe(path, offer.manifest, damage, {}, _protected(store.first, root))
        if verify is not None and not damage:
            offer.verify(verify)
    except GpuckptError as error:
        return Found(name, path, error.message), max(size, 1)
    except OSError as error:
        return Found(name, path, f"it cannot be read: {error.strerror}"), max(size, 1)
    return found, size


def _sizes(session: Sftp, root: bytes, manifest: Manifest) -> dict[str, int]:
    """Of the regular files in the directories that the manifest names."""
    found: dict[str, int] = {}
    for folder in sorted({posixpath.dirname(part.path) for part in manifest.parts})[:MOST_FOLDERS]:
        for entry in _names_in(session, posixpath.join(root, os.fsencode(folder))):
            if entry.is_file:
                found[posixpath.join(folder, os.fsdecode(entry.name))] = entry.size
    return found


def _names_in(session: Sftp, place: bytes) -> list[Entry]:
    try:
        return session.names(place)
    except FileNotFoundError:
        return []


def _protected(session: Sftp, root: bytes) -> tuple[Copy, ...]:
    place = posixpath.join(root, protection.NAME.encode())
    seen = session.look(place)
    if seen is None or not seen.is_file or seen.size > protection.MAX_BYTES:
        return ()
    return protection.parse(session.read_small(place, protection.MAX_BYTES))

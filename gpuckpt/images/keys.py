"""Who can open an image: its key, wrapped for each recipient as a file of the age format (pyrage does all of it)."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpuckpt.images.sealing import KEY_BYTES
from gpuckpt.model.errors import ImageCorrupt, NotFound, Refused, UsageError
from gpuckpt.system.files import open_plain

if TYPE_CHECKING:
    from collections.abc import Sequence

FILE = "key.age"
"""The wrapped key in an image."""

MAX_BYTES = 1 << 20
"""Of that file, and of an identity file."""

NOT_ASKED = "gpuckpt asks for no passphrase: name a file of age-keygen's, or an SSH key without one"


def recipients(texts: Sequence[str]) -> tuple[str, ...]:
    """What was named by --encrypt-to: recipients, or files with one in each line. Raises UsageError."""
    found = tuple(one for text in texts for one in _named(text))
    for one in found:
        _recipient(one)
    return found


def _named(text: str) -> list[str]:
    if text.startswith(("age1", "ssh-")):
        return [text]
    try:
        with os.fdopen(open_plain(text), "rb") as file:
            lines = file.read(MAX_BYTES).decode("utf-8", "replace").splitlines()
    except OSError:
        raise UsageError(
            f"--encrypt-to {text}: neither a recipient nor a file of them",
            "a recipient begins with age1 or ssh-ed25519",
        ) from None
    named = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    if not named:
        raise UsageError(f"--encrypt-to {text}: no recipient stands in it", "age-keygen -y prints one")
    return named


def _recipient(text: str) -> Any:
    import pyrage  # noqa: PLC0415  only for encrypted images

    try:
        return (pyrage.ssh if text.startswith("ssh-") else pyrage.x25519).Recipient.from_str(text)
    except pyrage.RecipientError as error:
        raise UsageError(
            f"--encrypt-to {text[:80]}: no recipient ({error})", "a recipient begins with age1 or ssh-ed25519"
        ) from None


def wrap(secret: bytes, to: Sequence[str]) -> bytes:
    """The image key for each of the recipients."""
    import pyrage  # noqa: PLC0415

    wrapped: bytes = pyrage.encrypt(secret, [_recipient(one) for one in to])
    return wrapped


def unwrap(wrapped: bytes, identity: Path) -> bytes:
    """The image key. Raises Refused where the identity opens nothing, NotFound, ImageCorrupt."""
    import pyrage  # noqa: PLC0415

    if len(wrapped) > MAX_BYTES:
        raise ImageCorrupt(f"{FILE} is too long for a wrapped key", "copy the image again, or restore another one")
    mine = _identities(_read(identity), identity)
    try:
        secret: bytes = pyrage.decrypt(wrapped, mine)
    except pyrage.DecryptError as error:
        raise Refused(
            f"{identity} does not open the image: {error}", "name the identity of one of its recipients"
        ) from None
    if len(secret) != KEY_BYTES:
        raise ImageCorrupt(f"{FILE} holds no image key", "do not restore this image")
    return secret


def _read(identity: Path) -> bytes:
    try:
        descriptor = open_plain(identity)
    except OSError as error:
        raise NotFound(f"{identity} cannot be read: {error.strerror}", "name an age identity or an SSH key") from None
    with os.fdopen(descriptor, "rb") as file:
        seen = os.fstat(descriptor)
        if os.pread(descriptor, 8, 0).startswith((b"ssh-", b"age1")):
            raise Refused(f"{identity} is a public key", "name the private one that belongs to it")
        if seen.st_mode & (stat.S_IRWXG | stat.S_IRWXO) or seen.st_uid not in (0, os.geteuid()):
            raise Refused(
                f"{identity} is not only yours (mode {stat.S_IMODE(seen.st_mode):04o}, user {seen.st_uid})",
                f"chmod 600 {identity}, and take a new key if others may have read it",
            )
        return file.read(MAX_BYTES)


def _identities(raw: bytes, where: Path) -> list[Any]:
    import pyrage  # noqa: PLC0415

    try:
        if b"-----BEGIN" in raw:
            return [pyrage.ssh.Identity.from_buffer(raw)]
        lines = [line.strip() for line in raw.decode("ascii", "replace").splitlines()]
        found = [pyrage.x25519.Identity.from_str(line) for line in lines if line and not line.startswith("#")]
    except pyrage.IdentityError as error:
        # The text is pyrage's own: never a line of the file, which is a key.
        raise Refused(f"{where} is no identity that can be used: {error}", NOT_ASKED) from None
    if not found:
        raise Refused(f"{where} holds no identity", "name a file of age-keygen's, or an SSH key")
    return found

"""What of an encrypted image is encrypted how: AES-256-GCM throughout, no key used for two contents.

    key.age          the image key, wrapped for each recipient (images/keys.py)
    packs/*.zst      frame by frame under the pack's own key, a random one; the nonce is where the frame begins, so
                     that none can be moved, repeated or taken from another pack
    packs/index, criu/*.img, files/*, manifest.sealed
                     as sealed files: 8 bytes of mark, then chunks of 1 MiB, each with its tag. The key of each is
                     derived from the image key, the image's id and the file's name; the nonce is the chunk's number
                     and whether it is the last one, as in the payload of age (C2SP age.md, STREAM)

The index holds the packs' keys: who takes a pack over takes its key along. Nothing here is compared but by GCM itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, BinaryIO, Protocol

import blake3

from gpuckpt.model.errors import ImageCorrupt
from gpuckpt.model.records import dataclass

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

KEY_BYTES = 32
TAG_BYTES = 16
NONCE_BYTES = 12
CHUNK_BYTES = 1 << 20
MARK = b"GPUCKSL1"
_PURPOSE = b"gpuckpt sealed file 1\0"
_AGAIN = "copy the image again, or restore another one"


class WrongTag(Exception):
    """What was read is not what was written there."""


class Writing(Protocol):
    """Where bytes go."""

    def write(self, content: bytes | memoryview, /) -> object:
        """Take them."""


@dataclass(frozen=True, slots=True)
class Written:
    """What has become of a content: its bytes and their BLAKE3, in hex."""

    size: int
    blake3: str


class FrameCipher:
    """The frames of one pack. For one thread."""

    def __init__(self, key: bytes) -> None:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM  # noqa: PLC0415  only for encrypted images

        self._cipher = AESGCM(key)

    def seal(self, at: int, content: bytes | memoryview, target: memoryview) -> memoryview:
        """Encrypt what will begin at `at` into `target`, whose used part is returned."""
        end = len(content) + TAG_BYTES
        self._cipher.encrypt_into(_at(at), content, None, target[:end])
        return target[:end]

    def open(self, at: int, stored: memoryview, target: memoryview) -> memoryview:
        """Decrypt what began at `at` into `target`, whose used part is returned. Raises WrongTag."""
        from cryptography.exceptions import InvalidTag  # noqa: PLC0415

        end = len(stored) - TAG_BYTES
        if not 0 <= end <= len(target):
            raise WrongTag
        try:
            self._cipher.decrypt_into(_at(at), stored, None, target[:end])
        except InvalidTag:
            raise WrongTag from None
        return target[:end]


def _at(position: int) -> bytes:
    return position.to_bytes(NONCE_BYTES, "little")


class ImageKey:
    """Seals and opens the files of one image."""

    def __init__(self, secret: bytes, image_id: str) -> None:
        self._secret = secret
        self._image_id = image_id

    def seal(self, name: str, source: BinaryIO, target: Writing, going_on: Callable[[], None]) -> Written:
        """Encrypt a file of the image. `going_on` is called between chunks and may raise. Raises OSError."""
        cipher, hasher, size = self._cipher(name), blake3.blake3(), 0

        def put(content: bytes) -> None:
            nonlocal size
            target.write(content)
            hasher.update(content)
            size += len(content)

        put(MARK)
        for number, chunk, last in _chunks(source, CHUNK_BYTES):
            put(cipher.encrypt(_nonce(number, last=last), chunk, None))
            going_on()
        return Written(size, hasher.hexdigest())

    def open(self, name: str, source: BinaryIO, target: Writing, going_on: Callable[[], None]) -> Written:
        """Decrypt a file of the image. Raises ImageCorrupt naming it, OSError, and what `going_on` raises."""
        from cryptography.exceptions import InvalidTag  # noqa: PLC0415

        cipher, hasher, size = self._cipher(name), blake3.blake3(), 0
        if source.read(len(MARK)) != MARK:
            raise ImageCorrupt(f"{name} is no sealed file", _AGAIN)
        try:
            for number, chunk, last in _chunks(source, CHUNK_BYTES + TAG_BYTES):
                content = cipher.decrypt(_nonce(number, last=last), chunk, None)
                target.write(content)
                hasher.update(content)
                size += len(content)
                going_on()
        except InvalidTag:
            raise ImageCorrupt(f"{name} was altered, or belongs to another image or another name", _AGAIN) from None
        return Written(size, hasher.hexdigest())

    def _cipher(self, name: str) -> _Cipher:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM  # noqa: PLC0415
        from cryptography.hazmat.primitives.hashes import SHA256  # noqa: PLC0415
        from cryptography.hazmat.primitives.kdf.hkdf import HKDF  # noqa: PLC0415

        info = _PURPOSE + self._image_id.encode() + b"\0" + name.encode("utf-8", "surrogateescape")
        derived = HKDF(algorithm=SHA256(), length=KEY_BYTES, salt=None, info=info).derive(self._secret)
        return AESGCM(derived)


class _Cipher(Protocol):
    def encrypt(self, nonce: bytes, data: bytes, associated_data: bytes | None) -> bytes: ...

    def decrypt(self, nonce: bytes, data: bytes, associated_data: bytes | None) -> bytes: ...


def _nonce(number: int, *, last: bool) -> bytes:
    return number.to_bytes(NONCE_BYTES - 1, "big") + bytes([last])


def _chunks(source: BinaryIO, size: int) -> Iterator[tuple[int, bytes, bool]]:
    """Number, content, whether it is the last one: at least one comes, perhaps empty."""
    number, chunk = 0, source.read(size)
    while True:
        following = source.read(size) if len(chunk) == size else b""
        yield number, chunk, not following
        if not following:
            return
        number, chunk = number + 1, following

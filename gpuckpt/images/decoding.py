"""From the stored bytes of a frame to its raw ones, of which nothing is believed before they were compared."""

from __future__ import annotations

import threading
from functools import lru_cache
from typing import TYPE_CHECKING

import blake3
import zstandard

from gpuckpt.images.encoding import CHECKSUM_BYTES
from gpuckpt.images.packindex import ZERO
from gpuckpt.images.sealing import FrameCipher, WrongTag
from gpuckpt.model.errors import ImageCorrupt

if TYPE_CHECKING:
    from gpuckpt.images.packindex import Frame, Index

MAX_WINDOW_BYTES = 1 << 27
"""No frame may make its reader set aside more."""

_DESCRIPTOR, _HAS_CHECKSUM = 4, 0x04
"""Where the Frame_Header_Descriptor of a zstd frame lies, and its Content_Checksum_Flag (RFC 8878, 3.1.1.1.1)."""

_AGAIN = "copy the image again, or restore another one"


def digest_of(raw: memoryview | bytes, key: bytes = b"") -> bytes:
    """BLAKE3 of a frame's raw bytes, keyed where there is a key; the interpreter's lock is released meanwhile."""
    return (blake3.blake3(raw, key=key) if key else blake3.blake3(raw)).digest()


@lru_cache(maxsize=512)
def zero_digest(length: int, key: bytes = b"") -> bytes:
    """BLAKE3 of so many zero bytes."""
    return digest_of(bytes(length), key)


class Decoder(threading.local):
    """Makes and verifies raw bytes; for any number of threads."""

    def __init__(self, index: Index) -> None:
        self._index = index
        self._decompressor = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW_BYTES)
        self._ciphers: dict[int, FrameCipher] = {}
        self._clear = bytearray()

    def decode(self, frame: Frame, stored: memoryview, target: memoryview) -> None:
        """Fill `target`, of the raw length, from a frame's stored bytes; these are altered where they can be.

        Raises ImageCorrupt naming pack and frame.
        """
        if self._index.packs[frame.pack].key:
            stored = self._opened(frame, stored, target)
        if frame.compressed:
            self._decompress(frame, stored, target)
        elif stored.obj is not target.obj:
            target[:] = stored
        self.verify(frame, target)

    def open(self, frame: Frame, stored: memoryview) -> memoryview:
        """What was encrypted of a frame, valid until this thread's next call. Raises ImageCorrupt."""
        return self._opened(frame, stored, memoryview(b""))

    def _opened(self, frame: Frame, stored: memoryview, target: memoryview) -> memoryview:
        """Decrypted: into the target where that needs nothing more, else into a buffer of this thread."""
        if frame.pack not in self._ciphers:
            self._ciphers[frame.pack] = FrameCipher(self._index.packs[frame.pack].key)
        if frame.compressed or not target:
            if len(self._clear) < len(stored):
                self._clear = bytearray(len(stored))
            target = memoryview(self._clear)
        try:
            return self._ciphers[frame.pack].open(frame.at, stored, target)
        except WrongTag:
            raise self.corrupt(frame, "it was altered, or is another frame than was written there") from None

    def verify(self, frame: Frame, raw: memoryview) -> None:
        """Compare raw bytes with the frame's digest. Raises ImageCorrupt."""
        if digest_of(raw, self._index.digest_key) != frame.digest:
            raise self.corrupt(frame, "its digest does not fit")

    def verify_zero(self, frame: Frame) -> None:
        """Compare the digest of a frame of which nothing is stored. Raises ImageCorrupt."""
        if frame.digest != zero_digest(frame.raw, self._index.digest_key):
            raise self.corrupt(frame, "it is said to be zero, its digest says otherwise")

    def _decompress(self, frame: Frame, stored: memoryview, target: memoryview) -> None:
        try:
            said = zstandard.get_frame_parameters(stored)
            if said.content_size != frame.raw or not said.has_checksum or said.window_size > MAX_WINDOW_BYTES:
                raise self.corrupt(frame, "it is another frame than the index says")
            if frame.checksum or self._index.packs[frame.pack].key:
                stored = self._unchecked(frame, stored)
            done = self._unpacked(stored, target)
        except zstandard.ZstdError as error:
            raise self.corrupt(frame, str(error)) from None
        if done != frame.raw:
            raise self.corrupt(frame, f"{done} bytes instead of {frame.raw}")

    def _unchecked(self, frame: Frame, stored: memoryview) -> memoryview:
        """The frame as if zstd had given it no checksum: the raw bytes' digest is compared after it.

        To compute both takes time, and finds nothing more: what only the checksum finds is a change of the checksum
        itself, and that is compared with what was written (in an encrypted pack its tag has told). Raises ImageCorrupt.
        """
        if frame.checksum and stored[-CHECKSUM_BYTES:] != frame.checksum:
            raise self.corrupt(frame, "its checksum was altered")
        if stored.readonly:
            stored = memoryview(bytearray(stored))
        stored[_DESCRIPTOR] &= ~_HAS_CHECKSUM
        return stored[:-CHECKSUM_BYTES]

    def _unpacked(self, stored: memoryview, target: memoryview) -> int:
        """How many bytes came, at most the target's. Raises zstandard.ZstdError."""
        done = 0
        with self._decompressor.stream_reader(stored, closefd=False) as reader:
            while done < len(target) and (count := reader.readinto(target[done:])):
                done += count
        return done

    def corrupt(self, frame: Frame, why: str) -> ImageCorrupt:
        """The failure of a frame that is not what the index says."""
        where = f"packs/{self._index.packs[frame.pack].file}" if frame.pack != ZERO else "packs/index"
        return ImageCorrupt(f"{where} is damaged in the frame at {frame.at} ({frame.stored} bytes): {why}", _AGAIN)

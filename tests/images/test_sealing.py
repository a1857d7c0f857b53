"""Sealed files and frames: what was altered, moved, cut, or belongs elsewhere never comes out of them."""

from __future__ import annotations

import hmac
import io

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuckpt.images.sealing import CHUNK_BYTES, MARK, TAG_BYTES, FrameCipher, ImageKey, WrongTag
from gpuckpt.model.errors import ImageCorrupt

SECRET, ID, NAME = bytes(range(32)), "0123456789abcdef" * 2, "criu/core-42.img"
KEY = ImageKey(SECRET, ID)
FRAME = "d1693a587cc5f1f5da36c7944e83c483f2c78848a98213"


def quiet() -> None:
    """Go on."""


def seal(content: bytes, name: str = NAME, key: ImageKey = KEY) -> bytes:
    out = io.BytesIO()
    key.seal(name, io.BytesIO(content), out, quiet)
    return out.getvalue()


def unseal(sealed: bytes, name: str = NAME, key: ImageKey = KEY) -> bytes:
    out = io.BytesIO()
    key.open(name, io.BytesIO(sealed), out, quiet)
    return out.getvalue()


def test_known_answers():
    """By hand (RFC 5869 and AES-256-GCM), and written down once: another form must have another mark."""
    first = hmac.digest(bytes(32), SECRET, "sha256")
    info = b"gpuckpt sealed file 1\0" + ID.encode() + b"\0" + NAME.encode()
    key = hmac.digest(first, info + b"\1", "sha256")
    sealed = seal(b"gpuckpt")
    assert sealed == MARK + AESGCM(key).encrypt(bytes(11) + b"\1", b"gpuckpt", None)
    assert sealed.hex() == "475055434b534c315a16ef4923907ad624236edaa5c16c6652d1e123c78d21"
    frame = bytes(FrameCipher(SECRET).seal(4096, b"gpuckpt", memoryview(bytearray(64))))
    assert frame == AESGCM(SECRET).encrypt((4096).to_bytes(12, "little"), b"gpuckpt", None)
    assert frame.hex() == FRAME


@settings(max_examples=15, deadline=None)
@given(st.sampled_from([0, 1, 100, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 2 * CHUNK_BYTES]))
def test_every_length_comes_back(size):
    content = bytes(size)
    sealed = seal(content)
    assert unseal(sealed) == content
    chunks = max(1, -(-size // CHUNK_BYTES))
    assert len(sealed) == len(MARK) + size + chunks * TAG_BYTES


def test_every_byte_counts():
    sealed = seal(b"gpuckpt")
    for at in range(len(sealed)):
        damaged = bytearray(sealed)
        damaged[at] ^= 1
        with pytest.raises(ImageCorrupt, match=NAME):
            unseal(bytes(damaged))
        with pytest.raises(ImageCorrupt, match=NAME):
            unseal(sealed[:at])
    with pytest.raises(ImageCorrupt):
        unseal(sealed + b"\0")


FULL = len(MARK), CHUNK_BYTES + TAG_BYTES


@pytest.mark.parametrize(
    "alter",
    [
        lambda mark, one, two, end: mark + two + one + end,
        lambda mark, one, two, end: mark + one + end,
        lambda mark, one, two, end: mark + one + two,
        lambda mark, one, two, end: mark + one + one + two + end,
        lambda mark, one, two, end: mark + one + two + end + end,
        lambda mark, one, two, end: mark + end,
        lambda mark, one, two, end: mark,
        lambda mark, one, two, end: b"",
    ],
    ids=["swapped", "dropped", "without end", "repeated", "longer", "only the end", "nothing", "empty"],
)
def test_chunks_stay_where_they_are(alter):
    sealed = seal(bytes(CHUNK_BYTES) + b"\1" * CHUNK_BYTES + b"end")
    start, step = FULL
    parts = (
        sealed[:start],
        sealed[start : start + step],
        sealed[start + step : start + 2 * step],
        sealed[start + 2 * step :],
    )
    assert unseal(b"".join(parts))[-3:] == b"end"
    with pytest.raises(ImageCorrupt):
        unseal(alter(*parts))


@pytest.mark.parametrize(
    ("name", "key"),
    [("criu/core-43.img", KEY), (NAME, ImageKey(SECRET, "f" * 32)), (NAME, ImageKey(bytes(32), ID))],
    ids=["another name", "another image", "another key"],
)
def test_a_file_of_elsewhere_does_not_open(name, key):
    with pytest.raises(ImageCorrupt, match="altered, or belongs to another image or another name"):
        unseal(seal(b"secret"), name, key)


def test_two_files_of_equal_content_look_different():
    assert seal(b"same", "files/0")[len(MARK) :] != seal(b"same", "files/1")[len(MARK) :]


def test_a_frame_opens_only_where_it_was_written():
    cipher, room = FrameCipher(SECRET), memoryview(bytearray(64))
    sealed = memoryview(bytes(cipher.seal(100, b"frame", memoryview(bytearray(64)))))
    assert bytes(cipher.open(100, sealed, room)) == b"frame"
    for wrong, at in ((cipher, 101), (FrameCipher(bytes(32)), 100)):
        with pytest.raises(WrongTag):
            wrong.open(at, sealed, room)
    for cut in (0, 5, TAG_BYTES - 1, len(sealed) - 1):
        with pytest.raises(WrongTag):
            cipher.open(100, sealed[:cut], room)
    with pytest.raises(WrongTag):
        cipher.open(100, sealed, memoryview(bytearray(4)))

"""CRIU's image files as bytes: their framing, and protobuf's wire format, without protobuf.

An image file is one or two magic numbers (u32), then messages, each behind its length (u32); all
little endian. CRIU's criu/include/magic.h has the numbers, criu/protobuf.c the framing.

Decoding keeps the exact bytes of every field, so that what is decoded and encoded again is identical,
unknown fields and unusual encodings included: CRIU versions differ in the fields they know. The files
are hostile input: every length is checked against what is there, and the numbers of messages and
fields are bounded, so that a forged file cannot take the memory of the host.
"""

from __future__ import annotations

import os
import stat
import struct
from typing import TYPE_CHECKING

from gpuckpt.model.errors import ImageCorrupt
from gpuckpt.model.records import dataclass

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

COMMON_MAGIC = 0x54564319
"""First number of every image file but the inventory (images of version 1.1, since CRIU 1.8)."""

MAX_FILE_BYTES = 64 << 20
"""One open file takes about 100 bytes in files.img: this is far above 300,000 of them."""
MAX_MESSAGES = 1 << 20
MAX_FIELDS = 1 << 17
"""Fields of one message; the longest list is the threads of one process."""

VARINT, FIXED64, CHUNK, FIXED32 = 0, 1, 2, 5
"""The wire types CRIU's messages use; the two group types (3, 4) are not among them."""
_FIXED_BYTES = {FIXED64: 8, FIXED32: 4}
_U32 = struct.Struct("<I")
_COPY_AGAIN = "copy the image again, or restore another one"


class Malformed(ValueError):
    """The bytes are no message; the text says what is wrong with them."""


@dataclass(frozen=True, slots=True)
class Field:
    """One field of a message. `raw` is its exact encoding, key included; `value` is what it means."""

    number: int
    kind: int
    value: int | bytes
    raw: bytes


@dataclass(frozen=True, slots=True)
class ImageFile:
    """A framed image file: its magic numbers as bytes and the body of each message."""

    magic: bytes
    messages: tuple[bytes, ...]


def integer(number: int, value: int) -> Field:
    """A new integer field; negative values are sign-extended to 64 bits as protobuf does."""
    value &= (1 << 64) - 1
    return Field(number, VARINT, value, _varint(number << 3 | VARINT) + _varint(value))


def chunk(number: int, value: bytes) -> Field:
    """A new field that holds a string, bytes or a message."""
    return Field(number, CHUNK, value, _varint(number << 3 | CHUNK) + _varint(len(value)) + value)


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _read_varint(body: bytes, start: int) -> tuple[int, int]:
    if start < len(body) and body[start] < 0x80:
        return body[start], start + 1  # nearly all numbers of an image
    value = 0
    # Ten groups of seven bits hold 64: an eleventh byte is damage.
    for position in range(start, min(start + 10, len(body))):
        byte = body[position]
        value |= (byte & 0x7F) << 7 * (position - start)
        if byte < 0x80:
            if value >> 64:
                raise Malformed("a number is larger than 64 bits")
            return value, position + 1
    raise Malformed("a number has no end")


def decode(body: bytes) -> tuple[Field, ...]:
    """The fields of a message, in order. Raises Malformed."""
    fields: list[Field] = []
    position = 0
    while position < len(body):
        if len(fields) >= MAX_FIELDS:
            raise Malformed("too many fields")
        field, position = _read_field(body, position)
        fields.append(field)
    return tuple(fields)


def _read_field(body: bytes, start: int) -> tuple[Field, int]:
    key, position = _read_varint(body, start)
    number, kind = key >> 3, key & 7
    if not 0 < number < 1 << 29:
        raise Malformed(f"no field can have the number {number}")
    value: int | bytes
    if kind == VARINT:
        value, end = _read_varint(body, position)
    else:
        position, end = _extent(body, position, kind)
        value = body[position:end]
    return Field(number, kind, value, body[start:end]), end


def _extent(body: bytes, position: int, kind: int) -> tuple[int, int]:
    """First and last position of a field's content."""
    if kind == CHUNK:
        size, position = _read_varint(body, position)
    elif kind in _FIXED_BYTES:
        size = _FIXED_BYTES[kind]
    else:
        raise Malformed(f"unknown wire type {kind}")
    if size > len(body) - position:
        raise Malformed("a field is longer than its message")
    return position, position + size


def encode(fields: Iterable[Field]) -> bytes:
    """The message with these fields: the inverse of decode, byte for byte."""
    return b"".join(field.raw for field in fields)


def number_of(fields: Iterable[Field], number: int, default: int = 0) -> int:
    """The last integer with this number (protobuf: the last one counts), or the default."""
    value = default
    for field in fields:
        if field.number == number and field.kind == VARINT and isinstance(field.value, int):
            value = field.value
    return value


def numbers_of(fields: Iterable[Field], number: int) -> tuple[int, ...]:
    """All integers with this number, plain or packed. Raises Malformed."""
    found: list[int] = []
    for field in fields:
        if field.number != number:
            continue
        if isinstance(field.value, int):
            found.append(field.value)
        elif field.kind == CHUNK:
            found.extend(_unpacked(field.value))
    return tuple(found)


def _unpacked(packed: bytes) -> Iterator[int]:
    position = count = 0
    while position < len(packed):
        count += 1
        if count > MAX_FIELDS:
            raise Malformed("too many numbers in a list")
        value, position = _read_varint(packed, position)
        yield value


def chunk_of(fields: Iterable[Field], number: int) -> bytes | None:
    """The last string, bytes or message with this number; None where there is none."""
    value = None
    for field in fields:
        if field.number == number and field.kind == CHUNK and isinstance(field.value, bytes):
            value = field.value
    return value


def text_of(fields: Iterable[Field], number: int) -> str:
    """The last string with this number, as text with surrogateescape (paths are bytes); '' where there is none."""
    return (chunk_of(fields, number) or b"").decode("utf-8", "surrogateescape")


def split(raw: bytes, magics: tuple[int, ...], where: str) -> ImageFile:
    """Take an image file apart; `magics` are the numbers it must begin with.

    Raises ImageCorrupt, naming `where`.
    """
    expected = b"".join(_U32.pack(magic) for magic in magics)
    if not raw.startswith(expected):
        found = raw[: len(expected)].hex(" ") or "nothing"
        raise ImageCorrupt(f"{where}: not the CRIU image file it should be (begins with {found})", _COPY_AGAIN)
    return ImageFile(expected, tuple(_messages(raw, len(expected), where)))


def _messages(raw: bytes, position: int, where: str) -> Iterator[bytes]:
    count = 0
    while position < len(raw):
        if len(raw) - position < _U32.size:
            raise ImageCorrupt(f"{where}: cut at its end ({len(raw)} bytes)", _COPY_AGAIN)
        (size,) = _U32.unpack_from(raw, position)
        position += _U32.size
        if size > len(raw) - position:
            raise ImageCorrupt(f"{where}: a message of {size} bytes goes beyond its end", _COPY_AGAIN)
        count += 1
        if count > MAX_MESSAGES:
            raise ImageCorrupt(f"{where}: more than {MAX_MESSAGES} messages", _COPY_AGAIN)
        yield raw[position : position + size]
        position += size


def join(image: ImageFile) -> bytes:
    """The image file's bytes: the inverse of split."""
    return image.magic + b"".join(_U32.pack(len(message)) + message for message in image.messages)


def read_image(path: str | os.PathLike[str]) -> bytes:
    """All bytes of a small image file.

    Follows no link in the last part of the path and does not wait for a FIFO. Raises ImageCorrupt when
    the file is missing, no regular file or larger than MAX_FILE_BYTES, OSError for other failures.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise ImageCorrupt(f"{os.fspath(path)} is missing", _COPY_AGAIN) from None
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ImageCorrupt(f"{os.fspath(path)} is no regular file", _COPY_AGAIN)
        with open(descriptor, "rb", closefd=False) as file:
            raw = file.read(MAX_FILE_BYTES + 1)
    finally:
        os.close(descriptor)
    if len(raw) > MAX_FILE_BYTES:
        raise ImageCorrupt(f"{os.fspath(path)} is larger than {MAX_FILE_BYTES >> 20} MiB", _COPY_AGAIN)
    return raw

"""The build-id of an ELF file: CRIU refuses a restore when a mapped file has another one."""

from __future__ import annotations

import os
import struct
from typing import BinaryIO, NamedTuple

PT_NOTE = 4
NT_GNU_BUILD_ID = 3
LARGEST_NOTES = 1 << 16
"""Bytes of one note segment that are read; real ones are a few hundred."""


class _Layout(NamedTuple):
    """Where elf(5) puts what for one word size."""

    header: str
    """e_phoff, e_flags, e_ehsize, e_phentsize, e_phnum."""
    header_at: int
    segment: str
    type_at: int
    offset_at: int
    size_at: int


_LAYOUTS = {
    1: _Layout("I4xI HHH", 28, "IIIIIIII", 0, 1, 4),
    2: _Layout("Q8xI HHH", 32, "IIQQQQQQ", 0, 2, 5),
}


def build_id(path: str) -> str | None:
    """The GNU build-id in hex, or None for files that have none, are no ELF or cannot be read.

    `path` may be one of /proc's magic links; it must lead to a regular file.
    """
    try:
        with open(path, "rb", opener=_opener) as file:
            return _build_id(file)
    except (OSError, struct.error):
        return None


def _opener(path: str, flags: int) -> int:
    # O_NONBLOCK: a lease held by the job must not make this open wait.
    return os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY)


def _build_id(file: BinaryIO) -> str | None:
    head = file.read(64)
    if head[:4] != b"\x7fELF" or len(head) < 52 or head[4] not in _LAYOUTS:
        return None
    order = "<" if head[5] == 1 else ">"
    layout = _LAYOUTS[head[4]]
    table_at, _flags, _size, entry_size, count = struct.unpack_from(order + layout.header, head, layout.header_at)
    file.seek(table_at)
    table = file.read(entry_size * count)
    for number in range(count):
        segment = struct.unpack_from(order + layout.segment, table, number * entry_size)
        if segment[layout.type_at] == PT_NOTE:
            file.seek(segment[layout.offset_at])
            found = find_build_id(file.read(min(segment[layout.size_at], LARGEST_NOTES)), order)
            if found is not None:
                return found
    return None


def find_build_id(notes: bytes, order: str = "<") -> str | None:
    """The build-id within a note segment: records of name length, data length, type, each part padded to 4."""
    at = 0
    while at + 12 <= len(notes):
        name_size, data_size, kind = struct.unpack_from(order + "III", notes, at)
        data_at = at + 12 + _padded(name_size)
        if kind == NT_GNU_BUILD_ID and notes[at + 12 : at + 16] == b"GNU\0":
            return notes[data_at : data_at + data_size].hex()
        at = data_at + _padded(data_size)
    return None


def _padded(size: int) -> int:
    return (size + 3) & ~3

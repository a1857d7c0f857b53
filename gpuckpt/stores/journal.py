"""The journal of an arrival: one record for each piece that is there, (BLAKE3 of its part, its number)."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

from gpuckpt.model.errors import ImageCorrupt
from gpuckpt.stores.protocol import PIECE_BYTES, count_pieces

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from gpuckpt.model.manifest import Part

RECORD = struct.Struct(">32sI")
MOST_JOURNAL = 64 << 20


def digest_bytes(part: Part) -> bytes:
    """A part's BLAKE3. Raises ImageCorrupt for what is none."""
    try:
        raw = bytes.fromhex(part.blake3)
    except ValueError:
        raw = b""
    if len(raw) != 32 or not 0 <= part.size < 1 << 60:
        raise ImageCorrupt(f"part {part.path[:200]!r} has no possible size and digest", "do not take this image in")
    return raw


def arrived(journal: bytes, parts: Sequence[Part]) -> dict[int, set[int]]:
    """Part -> pieces that the journal names. Records of other parts, and half a record at its end, are skipped."""
    numbers: dict[bytes, list[int]] = {}
    for index, part in enumerate(parts):
        numbers.setdefault(digest_bytes(part), []).append(index)
    found: dict[int, set[int]] = {}
    whole = len(journal) - len(journal) % RECORD.size
    for digest, piece in RECORD.iter_unpack(journal[:whole]):
        for index in numbers.get(digest, ()):
            if piece < count_pieces(parts[index].size):
                found.setdefault(index, set()).add(piece)
    return found


def ranges(pieces: Iterable[int]) -> list[tuple[int, int]]:
    """Sorted ranges, ends excluded."""
    found: list[tuple[int, int]] = []
    for piece in sorted(pieces):
        if found and found[-1][1] == piece:
            found[-1] = (found[-1][0], piece + 1)
        else:
            found.append((piece, piece + 1))
    return found


def held_bytes(parts: Sequence[Part], held: dict[int, Sequence[tuple[int, int]]]) -> int:
    """The bytes of all pieces that are there. The last piece of a part is shorter."""
    total = 0
    for index, found in held.items():
        size = parts[index].size
        total += sum(min(end * PIECE_BYTES, size) - min(start * PIECE_BYTES, size) for start, end in found)
    return total


def without(journal: bytes, dropped: set[bytes]) -> bytes:
    """A journal without the records of some parts."""
    whole = journal[: len(journal) - len(journal) % RECORD.size]
    return b"".join(RECORD.pack(*record) for record in RECORD.iter_unpack(whole) if record[0] not in dropped)

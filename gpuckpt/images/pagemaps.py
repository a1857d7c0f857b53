"""CRIU's images of one process's memory: which pages there are, in which mappings, and what to leave alone.

Field numbers are those of images/*.proto in CRIU (pagemap, mm, vma, core, core-x86, rseq) and were
compared with dumps of CRIU 4.2.1. All functions raise ImageCorrupt, naming the file, for anything that
is not a whole image file; addresses and lengths are bytes.
"""

from __future__ import annotations

from array import array
from contextlib import contextmanager
from typing import TYPE_CHECKING

from gpuckpt.images import wire
from gpuckpt.model.errors import ImageCorrupt
from gpuckpt.model.records import dataclass

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

PAGE = 4096
PAGEMAP_MAGIC = (wire.COMMON_MAGIC, 0x56084025)
MM_MAGIC = (wire.COMMON_MAGIC, 0x57492820)
CORE_MAGIC = (wire.COMMON_MAGIC, 0x55053847)

ADDRESS_LIMIT = 1 << 64
IN_PARENT, LAZY, PRESENT = 1, 2, 4
"""Flags of a pagemap entry. LAZY only says that the page may come later; it is in the pages file all the same."""

RED_ZONE = 128
FRAMES_BYTES = 1 << 20
"""Room below a stack pointer that pending signals can take: 64 frames with the registers of AMX (11 KiB each)."""

_AGAIN = "copy the image again, or restore another one"


@dataclass(frozen=True, slots=True)
class Mapping:
    """One mapping of a process: [start, end), mmap's prot and flags, CRIU's status bits (image.h), its advice."""

    start: int
    end: int
    prot: int
    flags: int
    status: int
    advice: int = 0
    """Bit n for madvise's advice n."""

    @property
    def size(self) -> int:
        """Its length in bytes."""
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class Pagemap:
    """The pages of one process, in the order of its pages file: entry n is `counts[n]` pages at `addresses[n]`."""

    head: bytes
    pages_id: int
    addresses: array[int]
    counts: array[int]
    flags: array[int]

    @property
    def file_bytes(self) -> int:
        """The length of its pages file."""
        return sum(count for count, flags in zip(self.counts, self.flags, strict=True) if flags & PRESENT) * PAGE


@contextmanager
def _named(where: str) -> Iterator[None]:
    try:
        yield
    except wire.Malformed as error:
        raise ImageCorrupt(f"{where}: {error}", _AGAIN) from None


def pages_file(pages_id: int) -> str:
    """The name of a pages file."""
    return f"pages-{pages_id}.img"


def decode_pagemap(raw: bytes, where: str) -> Pagemap:
    """Take a pagemap image apart. Entries must be whole pages at rising addresses that do not overlap."""
    messages = wire.split(raw, PAGEMAP_MAGIC, where).messages
    if not messages:
        raise ImageCorrupt(f"{where}: it has no head", _AGAIN)
    addresses, counts, flags = array("Q"), array("Q"), array("Q")
    with _named(where):
        pages_id = wire.number_of(wire.decode(messages[0]), 1)
        end = 0
        for message in messages[1:]:
            address, pages, flag = _entry(message)
            if address % PAGE or address < end or not 0 < pages * PAGE <= ADDRESS_LIMIT - address:
                raise wire.Malformed(f"an impossible entry: {pages} pages at {address:#x}")
            end = address + pages * PAGE
            addresses.append(address)
            counts.append(pages)
            flags.append(flag)
    return Pagemap(messages[0], pages_id, addresses, counts, flags)


def _entry(message: bytes) -> tuple[int, int, int]:
    """(address, pages, flags) of a pagemap entry."""
    values = _plain_numbers(message)
    # Field 5 is the 64-bit count of newer CRIUs, field 2 (32 bits) is 0 beside it; without flags the pages are there.
    flags = (values[4] or PRESENT) | (IN_PARENT if values[3] else 0)
    return values[1], values[5] or values[2], flags


def _plain_numbers(message: bytes) -> list[int]:
    """The numbers in a message of nothing but integers with field numbers below 16; 0 where there is none.

    wire.decode is four times slower, and there can be hundreds of thousands of these messages.
    """
    values = [0] * 16
    position, size = 0, len(message)
    while position < size:
        key = message[position]
        if key & 0x87:
            raise wire.Malformed("an entry of an unknown form")
        value = shift = 0
        while True:
            position += 1
            if position >= size or shift > 63:
                raise wire.Malformed("a number has no end")
            byte = message[position]
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                break
        if value >> 64:
            raise wire.Malformed("a number is larger than 64 bits")
        position += 1
        values[key >> 3] = value
    return values


def encode_pagemap(head: bytes, entries: Iterable[tuple[int, int, int]]) -> bytes:
    """A pagemap image with these (address, pages, flags) entries, as CRIU writes them."""
    messages = (wire.encode(_fields(*entry)) for entry in entries)
    magic = b"".join(number.to_bytes(4, "little") for number in PAGEMAP_MAGIC)
    return wire.join(wire.ImageFile(magic, (head, *messages)))


def _fields(address: int, pages: int, flags: int) -> tuple[wire.Field, ...]:
    narrow = 0 if pages >> 32 else pages
    # Both counts where they fit: older CRIUs read field 2 only, newer ones field 5 first.
    return wire.integer(1, address), wire.integer(2, narrow), wire.integer(4, flags), wire.integer(5, pages)


def decode_mappings(raw: bytes, where: str) -> tuple[Mapping, ...]:
    """The mappings in an mm image, in CRIU's order."""
    messages = wire.split(raw, MM_MAGIC, where).messages
    if len(messages) != 1:
        raise ImageCorrupt(f"{where}: {len(messages)} entries instead of one", _AGAIN)
    with _named(where):
        return tuple(decode_mapping(body) for body in _chunks(messages[0], 14))


def _chunks(message: bytes, number: int) -> Iterator[bytes]:
    for field in wire.decode(message):
        if field.number == number and isinstance(field.value, bytes):
            yield field.value


def decode_mapping(body: bytes) -> Mapping:
    """One of them, out of its bytes. Raises wire.Malformed."""
    values = _plain_numbers(body)
    start, end, prot, flags, status, advice = values[1], values[2], values[5], values[6], values[7], values[9]
    if start % PAGE or end % PAGE or not start < end <= ADDRESS_LIMIT:
        raise wire.Malformed(f"an impossible mapping: {start:#x}-{end:#x}")
    return Mapping(start, end, prot, flags, status, advice)


def decode_untouchable(raw: bytes, where: str) -> tuple[tuple[int, int], ...]:
    """The ranges [start, end) that the kernel writes to before a restored thread runs its first instruction.

    Their content must be in place before that, so they are left to CRIU: the thread's rseq area (the
    kernel writes the number of the CPU into it; writing over that makes lock-free code use another
    CPU's data), what lies below its stack pointer and its alternate signal stack (a pending signal's
    frame is put there on the way to the stop).
    """
    core = _core(raw, where)
    with _named(where):
        thread = wire.decode(wire.chunk_of(core, 5) or b"")
        rseq = wire.decode(wire.chunk_of(thread, 15) or b"")
        alternate = wire.decode(wire.chunk_of(thread, 7) or b"")
        stack = _stack_pointer(core)
    ranges = (
        (wire.number_of(rseq, 1), wire.number_of(rseq, 1) + wire.number_of(rseq, 2)),
        (max(0, stack - RED_ZONE - FRAMES_BYTES), stack),
        (wire.number_of(alternate, 1), wire.number_of(alternate, 1) + wire.number_of(alternate, 2)),
    )
    return tuple((start // PAGE * PAGE, -(-end // PAGE) * PAGE) for start, end in ranges if start < end)


def decode_stack_pointer(raw: bytes, where: str) -> int:
    """Where a thread's stack pointer was."""
    core = _core(raw, where)
    with _named(where):
        return _stack_pointer(core)


def _core(raw: bytes, where: str) -> tuple[wire.Field, ...]:
    messages = wire.split(raw, CORE_MAGIC, where).messages
    if not messages:
        raise ImageCorrupt(f"{where}: it is empty", _AGAIN)
    with _named(where):
        return wire.decode(messages[0])


def _stack_pointer(core: tuple[wire.Field, ...]) -> int:
    return wire.number_of(wire.decode(wire.chunk_of(wire.decode(wire.chunk_of(core, 2) or b""), 2) or b""), 20)

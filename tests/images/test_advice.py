"""Which mappings of an image CRIU advises the kernel to give huge pages."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuckpt.images import pagemaps, wire
from gpuckpt.images.advice import advise_huge_pages
from gpuckpt.images.pagemaps import PAGE, Mapping
from gpuckpt.model.errors import ImageCorrupt

HUGE = 1 << 14
ANONYMOUS = Mapping(64 * PAGE, 128 * PAGE, 3, 0x22, 0x201)


def entry(mapping: Mapping, *more: tuple[int, int]) -> bytes:
    values = (mapping.start, mapping.end, 0, 7, mapping.prot, mapping.flags, mapping.status, 2**64 - 1)
    return wire.encode(wire.integer(*one) for one in [*enumerate(values, 1), *more])


def mm(*entries: bytes) -> bytes:
    fields = [wire.integer(1, 4096), *(wire.chunk(14, one) for one in entries), wire.integer(13, 5)]
    magic = b"".join(struct.pack("<I", one) for one in pagemaps.MM_MAGIC)
    return wire.join(wire.ImageFile(magic, (wire.encode(fields),)))


def seen(raw: bytes) -> list[tuple[int, int, int]]:
    return [(one.start // PAGE, one.end // PAGE, one.advice) for one in pagemaps.decode_mappings(raw, "mm-5.img")]


@pytest.mark.parametrize(
    ("ranges", "expected"),
    [
        ([], [(64, 128, 0)]),
        ([(64, 128)], [(64, 128, HUGE)]),
        ([(0, 1000)], [(64, 128, HUGE)]),
        ([(64, 100)], [(64, 100, HUGE), (100, 128, 0)]),
        ([(100, 128)], [(64, 100, 0), (100, 128, HUGE)]),
        ([(80, 90), (100, 110)], [(64, 80, 0), (80, 90, HUGE), (90, 100, 0), (100, 110, HUGE), (110, 128, 0)]),
        ([(0, 64), (128, 200)], [(64, 128, 0)]),
    ],
)
def test_a_mapping_is_advised_where_it_is_meant(ranges, expected):
    where = [(start * PAGE, end * PAGE) for start, end in ranges]
    assert seen(advise_huge_pages(mm(entry(ANONYMOUS)), where, "mm-5.img")) == expected


def test_all_else_is_as_it_was():
    """Shared memory, what has its advice already."""
    shared = Mapping(200 * PAGE, 300 * PAGE, 3, 0x21, 0x101)
    advised = Mapping(300 * PAGE, 400 * PAGE, 3, 0x22, 0x201, advice=HUGE)
    before = mm(entry(shared, (9, 0)), entry(advised, (9, HUGE)))
    assert advise_huge_pages(before, [(0, 1000 * PAGE)], "mm-5.img") == before


def test_unknown_fields_of_a_mapping_stay():
    raw = advise_huge_pages(mm(entry(ANONYMOUS, (9, 4), (10, 11))), [(64 * PAGE, 70 * PAGE)], "mm-5.img")
    [message] = wire.split(raw, pagemaps.MM_MAGIC, "").messages
    entries = [wire.decode(one.value) for one in wire.decode(message) if one.number == 14]
    assert [wire.number_of(one, 10) for one in entries] == [11, 11]
    assert [wire.number_of(one, 9) for one in entries] == [4 | HUGE, 4]
    assert [wire.number_of(one, 4) for one in entries] == [7, 7]


@given(st.binary(max_size=60))
def test_damage_is_told(junk):
    raw = mm(entry(ANONYMOUS))
    for damaged in (junk, raw + junk, raw[: len(raw) // 2] + junk):
        try:
            advise_huge_pages(damaged, [(64 * PAGE, 70 * PAGE)], "mm-5.img")
        except ImageCorrupt as error:
            assert "mm-5.img" in error.message


ranges = st.lists(st.tuples(st.integers(0, 200), st.integers(1, 60)), max_size=6).map(
    lambda found: [(start * PAGE, (start + length) * PAGE) for start, length in found]
)


@given(ranges)
def test_every_page_is_in_one_mapping_and_advised_if_meant(where):
    found = seen(advise_huge_pages(mm(entry(ANONYMOUS)), where, "mm-5.img"))
    pages = [(page, advice) for start, end, advice in found for page in range(start, end)]
    meant = {page for start, end in where for page in range(start // PAGE, end // PAGE)}
    assert pages == [(page, HUGE if page in meant else 0) for page in range(64, 128)]


def test_many_mappings_and_many_ranges_take_no_time():
    """A hostile image may have 65,530 of the one and a thousand of the other."""
    entries = [entry(replace_range(number)) for number in range(2000)]
    where = [(number * 64 * PAGE, (number * 64 + 1) * PAGE) for number in range(1, 1001)]
    assert len(seen(advise_huge_pages(mm(*entries), where, "mm-5.img"))) == 3000


def replace_range(number: int) -> Mapping:
    return Mapping((number + 1) * 64 * PAGE, (number + 2) * 64 * PAGE, 3, 0x22, 0x201)

"""Frames end where addresses cross windows: the same memory is cut alike, wherever it lies in the pages file."""

from __future__ import annotations

import ctypes
import mmap
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuckpt.images.cuts import LARGE_BYTES, SMALLEST_BYTES, cut
from gpuckpt.images.packindex import FRAME_BYTES, Window
from gpuckpt.system.procfs import page_layout

PAGE = 4096
START = 0x7F0000000000


def frames(cuts, total):
    """(start, end) in the pages file, as a capture makes them."""
    found, at = [], 0
    while at < total:
        end = min(cuts.end_of(at), total)
        found.append((at, end))
        at = end
    return found


layouts = st.lists(
    st.tuples(st.integers(0, 3000), st.lists(st.tuples(st.integers(0, 2000), st.integers(1, 3000)), max_size=4)),
    max_size=12,
)


@given(layouts)
def test_any_layout_is_cut_into_whole_frames(layout):
    at, mappings, runs = START, [], []
    for gap, pieces in layout:
        at += gap * PAGE
        start = at
        for hole, pages in pieces:
            at += hole * PAGE
            runs.append((at, at + pages * PAGE))
            at += pages * PAGE
        mappings.append((start, at + PAGE))
        at += PAGE
    total = sum(end - start for start, end in runs)
    cuts = cut(1, mappings, runs)
    found = frames(cuts, total)
    assert sum(end - start for start, end in found) == total
    assert all(0 < end - start <= FRAME_BYTES for start, end in found)
    assert cuts.places == sorted(set(cuts.places))
    assert all(0 < place <= total for place in cuts.places)


def test_a_large_mapping_is_cut_alike_wherever_its_pages_lie():
    big = (START, START + 10 * FRAME_BYTES)
    for pages_before in (1, 7, 300, 1500):
        small = (START - (8 << 30), START - (8 << 30) + pages_before * PAGE)
        found = frames(cut(1, [small, big], [small, big]), pages_before * PAGE + 10 * FRAME_BYTES)
        assert [end - start for start, end in found[-10:]] == [FRAME_BYTES] * 10


def test_a_mapping_that_has_grown_downwards_is_cut_as_the_base_was():
    old = (START, START + 10 * FRAME_BYTES)
    before = cut(1, [old], [old])
    new = (START - 5 * PAGE, old[1])
    after = cut(1, [new], [new], before.windows)
    found = frames(after, new[1] - new[0])
    ends = {end - 5 * PAGE for _, end in found}
    assert {n * FRAME_BYTES for n in range(1, 11)} <= ends
    assert after.windows == [Window(1, new[0], new[1], START)]
    assert cut(2, [new], [new], before.windows).windows[0].origin == new[0], "another process is no model"


def test_sixty_thousand_small_mappings_share_frames():
    mappings = [(START + n * 2 * PAGE, START + n * 2 * PAGE + PAGE) for n in range(60_000)]
    found = frames(cut(1, mappings, mappings), 60_000 * PAGE)
    assert len(found) <= 60_000 * PAGE // LARGE_BYTES + 1


def test_a_page_in_each_window_of_a_reservation_shares_frames():
    runs = [(START + n * FRAME_BYTES, START + n * FRAME_BYTES + PAGE) for n in range(10_000)]
    found = frames(cut(1, [(START, START + (1 << 40))], runs), 10_000 * PAGE)
    assert len(found) <= 10_000 * PAGE // SMALLEST_BYTES + 1


def test_a_run_over_touching_mappings_is_split_between_them():
    one, two = (START, START + FRAME_BYTES), (START + FRAME_BYTES, START + 3 * FRAME_BYTES)
    cuts = cut(1, [one, two], [(one[0], two[1])])
    assert [window.start for window in cuts.windows] == [one[0], two[0]]
    assert cuts.places == [FRAME_BYTES, 2 * FRAME_BYTES, 3 * FRAME_BYTES]


def test_the_layout_of_a_living_process():
    layout = page_layout(os.getpid())
    if layout is None:
        pytest.skip("no PAGEMAP_SCAN in this kernel")
    area = mmap.mmap(-1, 64 * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    where = ctypes.addressof(ctypes.c_char.from_buffer(area))
    area[5 * PAGE] = 1
    area[6 * PAGE] = 1
    area[9 * PAGE] = 1
    layout = page_layout(os.getpid())
    assert [run for run in layout.runs if where <= run[0] < where + 64 * PAGE] == [
        (where + 5 * PAGE, where + 7 * PAGE),
        (where + 9 * PAGE, where + 10 * PAGE),
    ]
    assert any(start <= where < end for start, end in layout.mappings)


def test_a_process_that_is_gone_has_no_layout():
    assert page_layout(1 << 22) is None

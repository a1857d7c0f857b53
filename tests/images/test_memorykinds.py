"""What memory is made of, from mappings, pagemaps and frames that are made up."""

from pathlib import Path

import pytest

from gpuckpt.images.memorykinds import Piece, _Areas, _in_frames, _pieces_of, changes, picture
from gpuckpt.images.packindex import ZERO, Frame
from gpuckpt.images.pagemaps import PAGE, Mapping, encode_pagemap
from gpuckpt.model.errors import ImageCorrupt

REGULAR, STACK, HEAP, FILE, SHARED, ANON = 1, 1 << 1, 1 << 5, 1 << 6, 1 << 8, 1 << 9
MIB = 1 << 20


def area(start, size, status, flags=0x22):
    return Mapping(start, start + size, 3, flags, REGULAR | status)


def frame(offset, raw, *, pack=0, at=0, stored=None, digest=b"x"):
    stored = (0 if pack == ZERO else raw) if stored is None else stored
    return Frame(offset, raw, pack, at, stored, stored < raw, digest)


def kinds(areas, *, stacks=(), gpu_bytes=0):
    made = _Areas(areas, set(stacks), gpu_bytes)
    return [made.cut(one.start, one.end).__next__()[0] for one in sorted(areas, key=lambda one: one.start)]


def test_each_mapping_has_its_kind():
    areas = [
        area(0x10000, PAGE, HEAP | ANON),
        area(0x20000, PAGE, FILE),
        area(0x30000, PAGE, SHARED),
        area(0x40000, PAGE, ANON),
        area(0x50000, PAGE, STACK | ANON),
        area(0x60000, PAGE, ANON, flags=0x122),
        area(0x70000, PAGE, 1 << 3),
    ]
    assert kinds(areas) == ["heap", "files", "shared", "anonymous", "stacks", "stacks", "special"]


def test_a_threads_stack_is_found_by_its_pointer_unless_it_lies_in_a_heap():
    areas = [area(MIB, 8 * MIB, ANON), area(100 * MIB, 64 * MIB, ANON)]
    assert kinds(areas, stacks={MIB + 5000, 120 * MIB}) == ["stacks", "anonymous"]


def test_the_largest_mapping_is_the_drivers_copy_only_if_it_is_about_as_large():
    areas = [area(MIB, MIB, ANON), area(100 * MIB, 64 * MIB, ANON)]
    assert kinds(areas, gpu_bytes=60 * MIB) == ["anonymous", "GPU copy"]
    assert kinds(areas, gpu_bytes=500 * MIB) == ["anonymous", "anonymous"]
    assert kinds(areas) == ["anonymous", "anonymous"]


def test_a_run_of_pages_is_cut_where_mappings_end():
    areas = _Areas([area(0x2000, 0x2000, HEAP), area(0x6000, 0x1000, ANON)], set(), 0)
    assert list(areas.cut(0x1000, 0x8000)) == [
        ("special", 0x1000), ("heap", 0x2000), ("special", 0x2000), ("anonymous", 0x1000), ("special", 0x1000),
    ]  # fmt: skip


def test_runs_are_cut_where_frames_end():
    first, second = frame(0, 100), frame(100, 50)
    found = list(_in_frames(7, [("heap", 60), ("stacks", 70), ("heap", 20)], [first, second]))
    assert [(one.kind, one.held, one.frame) for one in found] == [
        ("heap", 60, first), ("stacks", 40, first), ("stacks", 30, second), ("heap", 20, second),
    ]  # fmt: skip
    assert [one.frame for one in _in_frames(7, [("heap", 60)], None)] == [None]


def test_a_picture_counts_each_stored_byte_once():
    half, twice, none = (
        frame(0, 4 * PAGE, stored=2 * PAGE),
        frame(0, 4 * PAGE, stored=2 * PAGE),
        frame(0, PAGE, pack=ZERO),
    )
    found = [Piece(1, "heap", 3 * PAGE, half), Piece(1, "stacks", PAGE, half), Piece(2, "heap", 4 * PAGE, twice)]
    drawn = picture([*found, Piece(0, "shared", PAGE, none)], 9 * PAGE)
    assert [(one.kind, one.held, one.zero, one.stored) for one in drawn.kinds] == [
        ("heap", 7 * PAGE, 0, 3 * PAGE // 2), ("stacks", PAGE, 0, PAGE // 2), ("shared", PAGE, PAGE, 0),
    ]  # fmt: skip
    assert [(one.pid, one.held, one.stored) for one in drawn.processes] == [(1, 4 * PAGE, 2 * PAGE), (2, 4 * PAGE, 0)]
    heap = drawn.kinds[0].blocks
    assert drawn.block_bytes == PAGE
    assert [(one.held, one.stored) for one in heap] == [(PAGE, PAGE // 2)] * 3 + [(PAGE, 0)] * 4


def test_a_large_picture_has_few_blocks():
    drawn = picture([Piece(1, "anonymous", 3 * MIB + 5, frame(0, 4 * MIB)) for _ in range(1000)], 3000 * MIB)
    blocks = drawn.kinds[0].blocks
    assert len(blocks) <= 400
    assert sum(one.held for one in blocks) == drawn.kinds[0].held == 1000 * (3 * MIB + 5)
    assert all(one.held == drawn.block_bytes for one in blocks[:-1])


def test_what_changed_is_what_the_other_image_holds_nowhere():
    here = [Piece(1, "heap", 10, frame(0, 10, digest=b"a")), Piece(1, "heap", 20, frame(10, 20, digest=b"new"))]
    other = [Piece(9, "stacks", 10, frame(0, 10, digest=b"a"))]
    assert [(one.kind, one.held, one.other_held, one.changed) for one in changes(here, other)] == [
        ("heap", 30, 0, 20), ("stacks", 0, 10, 0),
    ]  # fmt: skip
    plain = [Piece(1, "heap", 30, None)]
    assert [one.changed for one in changes(plain, other)] == [None, None]
    assert [one.changed for one in changes(here, plain)] == [None]


def test_pieces_of_a_file_that_does_not_fit_are_refused(tmp_path: Path):
    path = tmp_path / "pagemap-1.img"
    path.write_bytes(encode_pagemap(b"\x08\x01", [(0x1000, 2, 4)]))
    with pytest.raises(ImageCorrupt, match=r"pages-1\.img does not have the 8192 bytes"):
        list(_pieces_of(1, path, {"pages-1.img": (frame(0, PAGE),)}, lambda start, end: [("heap", end - start)]))
    fits = {"pages-1.img": (frame(0, 2 * PAGE),)}
    assert sum(one.held for one in _pieces_of(1, path, fits, lambda start, end: [("heap", end - start)])) == 2 * PAGE

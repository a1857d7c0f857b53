"""What is injected and what is left to CRIU: for any memory, every page goes exactly one way."""

from __future__ import annotations

import struct
from array import array
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuckpt.images import memory, pagemaps, wire
from gpuckpt.images.lean import PagesFile, _by_frame
from gpuckpt.images.memory import MemoryPlan, ProcessMemory, Split, is_injectable, split, subtract
from gpuckpt.images.packindex import Frame
from gpuckpt.images.pagemaps import LAZY, PAGE, PRESENT, Mapping, Pagemap
from gpuckpt.model.errors import ImageCorrupt

HEAD = wire.encode((wire.integer(1, 7),))

runs = st.lists(
    st.tuples(st.integers(0, 5), st.integers(1, 9), st.sampled_from([PRESENT, PRESENT | LAZY, LAZY])), max_size=40
)
"""(pages left out before, pages, flags) of each entry."""
ranges = st.lists(st.tuples(st.integers(0, 200), st.integers(0, 40)), max_size=12).map(
    lambda found: [(start * PAGE, (start + length) * PAGE) for start, length in found if length]
)


def pagemap_of(entries) -> Pagemap:
    addresses, counts, flags, at = array("Q"), array("Q"), array("Q"), 0
    for gap, count, flag in entries:
        at += gap * PAGE
        addresses.append(at)
        counts.append(count)
        flags.append(flag)
        at += count * PAGE
    return Pagemap(HEAD, 7, addresses, counts, flags)


def pages_of(pagemap: Pagemap) -> dict[int, int]:
    """Address of each page in the pages file -> its offset there."""
    found, offset = {}, 0
    for address, count, flags in zip(pagemap.addresses, pagemap.counts, pagemap.flags, strict=True):
        if flags & PRESENT:
            for page in range(count):
                found[address + page * PAGE] = offset + page * PAGE
            offset += count * PAGE
    return found


def spread(pieces) -> dict[int, int]:
    found = {}
    for address, offset, length in zip(pieces.addresses, pieces.offsets, pieces.lengths, strict=True):
        for byte in range(0, length, PAGE):
            assert address + byte not in found
            found[address + byte] = offset + byte
    return found


def kept_pages(done: Split) -> dict[int, int]:
    """Address -> offset in the whole file, of what CRIU reads from the small one."""
    offsets = [at for start, length in done.kept for at in range(start, start + length, PAGE)]
    rewritten = pagemaps.decode_pagemap(done.pagemap, "x")
    assert rewritten.file_bytes == len(offsets) * PAGE
    return {address: offsets[at // PAGE] for address, at in pages_of(rewritten).items()}


@settings(deadline=None)
@given(runs, ranges)
def test_rewritten_and_injected_are_the_original(entries, wanted):
    original = pagemap_of(entries)
    whole = subtract(wanted, [])
    done = split(original, whole)
    injected, kept = spread(done.injected), kept_pages(done)
    assert not injected.keys() & kept.keys()
    assert injected | kept == pages_of(original)
    assert all(any(low <= address < high for low, high in whole) for address in injected)
    assert not any(low <= address < high for address in kept for low, high in whole)
    rewritten = pagemaps.decode_pagemap(done.pagemap, "x")
    assert rewritten.pages_id == 7
    absent = [
        entry for entry in zip(original.addresses, original.counts, original.flags, strict=True) if entry[2] == LAZY
    ]
    assert [
        e for e in zip(rewritten.addresses, rewritten.counts, rewritten.flags, strict=True) if e[2] == LAZY
    ] == absent


@settings(deadline=None)
@given(ranges, ranges)
def test_ranges_without_holes(wanted, holes):
    left = subtract(wanted, holes)
    pages = {at for low, high in left for at in range(low, high, PAGE)}
    assert pages == {at for low, high in wanted for at in range(low, high, PAGE)} - {
        at for low, high in holes for at in range(low, high, PAGE)
    }
    assert list(left) == sorted(left)
    assert sum(high - low for low, high in left) == len(pages) * PAGE


def filled(address: int) -> bytes:
    return struct.pack("<Q", address) * (PAGE // 8)


def frames_of(total_pages: int, cuts) -> tuple[Frame, ...]:
    edges = sorted({0, total_pages, *(cut % (total_pages or 1) for cut in cuts)})
    return tuple(Frame(a * PAGE, (b - a) * PAGE, 0, 0, 1, False, b"") for a, b in pairwise(edges))


@settings(max_examples=60, deadline=None)
@given(runs, ranges, st.lists(st.integers(0, 400), max_size=20))
def test_frames_cut_anywhere_bring_every_page_to_its_place(entries, wanted, cuts):
    original = pagemap_of(entries)
    done = split(original, subtract(wanted, []))
    content = b"".join(map(filled, pages_of(original)))
    frames = frames_of(len(content) // PAGE, cuts)
    seen = {}
    for frame in frames:
        for address, offset, length in done.injected.within(frame.offset, frame.raw):
            for byte in range(0, length, PAGE):
                at = frame.offset + offset + byte
                assert address + byte not in seen
                seen[address + byte] = content[at : at + PAGE]
    small = bytearray(sum(length for _, length in done.kept))
    for frame, parts in _by_frame(PagesFile("x", frames, done.kept)):
        for offset, length, at in parts:
            assert offset >= 0 and offset + length <= frame.raw
            small[at : at + length] = content[frame.offset + offset : frame.offset + offset + length]
    for number, address in enumerate(pages_of(pagemaps.decode_pagemap(done.pagemap, "x"))):
        assert address not in seen
        seen[address] = bytes(small[number * PAGE : (number + 1) * PAGE])
    assert seen == {address: filled(address) for address in pages_of(original)}


ORDINARY = Mapping(0x10000000, 0x20000000, prot=3, flags=0x22, status=0x201)


@pytest.mark.parametrize(
    "change",
    [
        {"prot": 1},
        {"prot": 0},
        {"prot": 2},
        {"flags": 0x21, "status": 0x101},
        {"flags": 0x02, "status": 0x41},
        {"flags": 0x122},
        {"flags": 0x40022},
        {"status": 0x203},
        {"status": 0x4101},
        {"status": 0x2201},
        {"status": 0x209},
        {"status": 0x8201},
        {"status": 0x10201},
        {"status": 1 << 31 | 0x201},
    ],
    ids=str,
)
def test_special_mappings_are_left_to_criu(change):
    values = {name: getattr(ORDINARY, name) for name in Mapping.__slots__} | change
    assert not is_injectable(Mapping(**values))


@pytest.mark.parametrize("change", [{}, {"status": 0x221}, {"flags": 0x4022}, {"prot": 7}], ids=str)
def test_ordinary_mappings_are_injected(change):
    values = {name: getattr(ORDINARY, name) for name in Mapping.__slots__} | change
    assert is_injectable(Mapping(**values))


def image(magic, *messages: bytes) -> bytes:
    return wire.join(wire.ImageFile(b"".join(struct.pack("<I", one) for one in magic), messages))


def entry(*numbers: tuple[int, int]) -> bytes:
    return wire.encode(wire.integer(*number) for number in numbers)


class Forge:
    """A directory of CRIU's small files, made by hand."""

    def __init__(self, directory):
        self.directory = directory
        self.tree: list[bytes] = []
        self.frames: dict[str, tuple[Frame, ...]] = {}
        self.content: dict[bytes, bytes] = {}

    def process(self, pid, ppid, mappings, pages, *, core=b"", salt=0):
        self.tree.append(entry((1, pid), (2, ppid), (3, pid), (4, pid), (5, pid)))
        vmas = [
            wire.chunk(
                14,
                entry(
                    *((1, m.start), (2, m.end), (3, 0), (4, 0), (5, m.prot), (6, m.flags), (7, m.status), (8, 1)),
                    (9, m.advice),
                ),
            )
            for m in mappings
        ]
        entries = [entry((1, at), (2, 0), (4, PRESENT), (5, count)) for at, count in pages]
        self.write(f"mm-{pid}.img", image(pagemaps.MM_MAGIC, wire.encode(vmas)))
        self.write(f"pagemap-{pid}.img", image(pagemaps.PAGEMAP_MAGIC, entry((1, pid)), *entries))
        self.write(f"core-{pid}.img", image(pagemaps.CORE_MAGIC, core))
        self.fill(pid, b"".join(filled(at + n * PAGE + salt) for at, count in pages for n in range(count)))

    def fill(self, pid, content):
        frames = []
        for at in range(0, len(content), 1 << 20):
            digest = str((pid, at)).encode()
            self.content[digest] = content[at : at + (1 << 20)]
            frames.append(Frame(at, len(self.content[digest]), 0, 0, 1, False, digest))
        self.frames[f"pages-{pid}.img"] = tuple(frames)

    def read(self, frame):
        """As a PackReader does."""
        return memoryview(self.content[frame.digest])

    def write(self, name, raw):
        (self.directory / name).write_bytes(raw)

    def plan(self, **options) -> MemoryPlan:
        self.write("pstree.img", image((wire.COMMON_MAGIC, 0x50273030), *self.tree))
        return memory.plan(self.directory, self.frames, self, **options)


@pytest.fixture
def forge(tmp_path):
    return Forge(tmp_path)


def core(*, stack=0, rseq=(0, 0), alternate=(0, 0)) -> bytes:
    registers = wire.chunk(2, entry((20, stack)))
    thread = [
        wire.chunk(15, entry((1, rseq[0]), (2, rseq[1]))),
        wire.chunk(7, entry((1, alternate[0]), (2, alternate[1]))),
    ]
    return wire.encode((wire.chunk(2, wire.encode((registers,))), wire.chunk(5, wire.encode(thread))))


def test_a_large_mapping_is_injected_and_the_rest_is_not(forge):
    small = Mapping(0x1000, 0x5000, 3, 0x22, 0x201)
    forge.process(5, 0, [small, ORDINARY], [(0x2000, 1), (ORDINARY.start, 16)])
    [one] = forge.plan().processes
    assert (one.pid, one.pages, one.split.injected.bytes) == (5, "pages-5.img", 16 * PAGE)
    assert one.split.kept == ((0, PAGE),)
    assert spread(one.split.injected)[ORDINARY.start] == PAGE


def test_what_parent_and_child_may_share_goes_through_criu(forge):
    other = Mapping(0x30000000, 0x40000000, 3, 0x22, 0x201)
    forge.process(5, 0, [ORDINARY, other], [(ORDINARY.start, 16), (other.start, 2)])
    forge.process(6, 5, [ORDINARY], [(ORDINARY.start, 16)])
    forge.process(7, 6, [ORDINARY, other], [(ORDINARY.start, 16), (other.start, 3)])
    found = {one.pid: one.split.injected.bytes for one in forge.plan().processes}
    assert found == {5: 2 * PAGE, 7: 3 * PAGE}  # 7's parent lacks `other`: CRIU would not share it either


def test_memory_at_the_same_place_that_is_not_shared_is_injected(forge):
    """Forked processes allocate at the same addresses: the pages tell."""
    pages = [(ORDINARY.start, 8192)]
    forge.process(5, 0, [ORDINARY], pages)
    forge.process(6, 5, [ORDINARY], pages, salt=1)
    assert [one.split.injected.bytes for one in forge.plan().processes] == [8192 * PAGE] * 2
    content = b"".join(forge.content[frame.digest] for frame in forge.frames["pages-5.img"])
    for share in (0.1, 0.5, 0.95):
        forge_some = int(share * 8192) * PAGE
        forge.fill(6, bytes(8192 * PAGE - forge_some) + content[-forge_some:])
        assert forge.plan().processes == ()
    forge.fill(6, bytes(8192 * PAGE))
    forge.fill(5, bytes(8192 * PAGE))
    assert len(forge.plan().processes) == 2  # zero pages are no sign of sharing


def test_small_mappings_are_left_to_criu(forge):
    small = Mapping(0x10000000, 0x10000000 + memory.MIN_MAPPING_BYTES - PAGE, 3, 0x22, 0x201)
    forge.process(5, 0, [small], [(small.start, 4)])
    assert forge.plan().processes == ()


def test_what_the_kernel_writes_first_goes_through_criu(forge):
    start = ORDINARY.start
    marks = core(stack=start + 0x500000, rseq=(start + 0x600020, 32), alternate=(start + 0x700000, 0x2000))
    forge.process(5, 0, [ORDINARY], [(start, 0x800)], core=marks)
    [one] = forge.plan().processes
    injected = spread(one.split.injected)
    held_out = {start + 0x600000, start + 0x700000, start + 0x701000}
    held_out |= set(range(start + 0x500000 - pagemaps.FRAMES_BYTES - PAGE, start + 0x500000, PAGE))
    assert set(range(start, start + 0x800000, PAGE)) - injected.keys() == held_out


def test_what_will_have_huge_pages_is_injected_and_not_filled(forge):
    """Each range that is filled lies in one mapping: the kernel fills no more at once."""
    beside = Mapping(ORDINARY.end, ORDINARY.end + 0x1000000, 3, 0x22, 0x201)
    forge.process(5, 0, [ORDINARY, beside], [(ORDINARY.start, 16), (beside.start, 16)])
    huge = (ORDINARY.start + 0x200000, ORDINARY.start + 0x400000)
    [one] = forge.plan(huge={5: [huge]}).processes
    assert one.split.injected.bytes == 32 * PAGE
    edges = [(ORDINARY.start, huge[0]), (huge[1], ORDINARY.end), (beside.start, beside.end)]
    assert list(one.small_pages) == edges
    [one] = forge.plan(huge={6: [huge]}).processes
    assert list(one.small_pages) == [(ORDINARY.start, ORDINARY.end), (beside.start, beside.end)]


def test_only_mappings_of_pages_made_one_by_one_are_filled(forge):
    """Not those of huge pages, and not those whose pages are all there from the start."""
    at = 0x30000000
    huge = Mapping(at, at + 0x1000000, 3, 0x22, 0x201, advice=1 << 14)
    locked = Mapping(at + 0x1000000, at + 0x2000000, 3, 0x2022, 0x201)
    other = Mapping(at + 0x2000000, at + 0x3000000, 3, 0x22, 0x201, advice=1 << 10)
    mappings = [ORDINARY, huge, locked, other]
    forge.process(5, 0, mappings, [(one.start, 16) for one in mappings])
    [one] = forge.plan().processes
    assert one.split.injected.bytes == 4 * 16 * PAGE
    assert one.small_pages == ((ORDINARY.start, ORDINARY.end), (other.start, other.end))


def test_frames_that_end_within_a_page_fill_nothing(forge):
    """As no gpuckpt cuts them."""
    forge.process(5, 0, [ORDINARY], [(ORDINARY.start, 16)])
    whole = forge.frames["pages-5.img"][0]
    forge.frames["pages-5.img"] = (
        replace(whole, raw=PAGE + 1),
        replace(whole, offset=PAGE + 1, raw=15 * PAGE - 1),
    )
    [one] = forge.plan().processes
    assert (one.split.injected.bytes, one.small_pages) == (16 * PAGE, ())


def test_pages_files_that_do_not_fit_are_refused(forge):
    forge.process(5, 0, [ORDINARY], [(ORDINARY.start, 16)])
    forge.fill(5, bytes(17 * PAGE))
    with pytest.raises(ImageCorrupt, match=r"pages-5\.img"):
        forge.plan()


def test_a_parent_image_is_left_to_criu(forge):
    forge.process(5, 0, [ORDINARY], [(ORDINARY.start, 16)])
    entries = [entry((1, ORDINARY.start), (2, 16), (3, 1), (4, 1))]
    forge.write("pagemap-5.img", image(pagemaps.PAGEMAP_MAGIC, entry((1, 5)), *entries))
    assert forge.plan().processes == ()


@pytest.mark.parametrize(
    "entries",
    [
        [(0x1001, 1)],
        [(0x1000, 2), (0x2000, 1)],
        [(0x5000, 1), (0x1000, 1)],
        [(0x1000, 0)],
        [(0x1000, 1 << 52)],
        [((1 << 64) - PAGE, 2)],
    ],
    ids=str,
)
def test_impossible_pagemaps_are_refused(entries):
    raw = image(
        pagemaps.PAGEMAP_MAGIC, HEAD, *(entry((1, at), (2, 0), (4, PRESENT), (5, count)) for at, count in entries)
    )
    with pytest.raises(ImageCorrupt, match="impossible"):
        pagemaps.decode_pagemap(raw, "pagemap-1.img")


@pytest.mark.parametrize(("start", "end"), [(0x1000, 0x1000), (0x2000, 0x1000), (0x1001, 0x2000)])
def test_impossible_mappings_are_refused(start, end):
    raw = image(pagemaps.MM_MAGIC, wire.encode((wire.chunk(14, entry((1, start), (2, end))),)))
    with pytest.raises(ImageCorrupt, match="impossible"):
        pagemaps.decode_mappings(raw, "mm-1.img")


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=60), st.sampled_from([pagemaps.PAGEMAP_MAGIC, pagemaps.MM_MAGIC, pagemaps.CORE_MAGIC]))
def test_any_bytes_are_read_or_refused(body, magic):
    raw = image(magic, HEAD, body) if magic == pagemaps.PAGEMAP_MAGIC else image(magic, body)
    for read in (pagemaps.decode_pagemap, pagemaps.decode_mappings, pagemaps.decode_untouchable):
        try:
            read(raw, "x")
        except ImageCorrupt:
            continue


def test_pieces_are_joined_where_they_go_on():
    done = split(pagemap_of([(0, 4, PRESENT), (0, 4, PRESENT | LAZY), (3, 2, PRESENT)]), [(0, 100 * PAGE)])
    assert list(done.injected.lengths) == [8 * PAGE, 2 * PAGE]
    assert ProcessMemory(1, "pages-1.img", done).split.injected.bytes == 10 * PAGE

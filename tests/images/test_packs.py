"""Packs: any split of memory over frames and packs comes back; whatever is changed in them is found."""

from __future__ import annotations

import os
import random
import struct
import threading

import blake3
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpuckpt.images import lean, packs
from gpuckpt.images.encoding import FrameCoder, checksum_of
from gpuckpt.images.framesource import verify_all
from gpuckpt.images.packs import Index, PackReader, PackWriter, Window
from gpuckpt.model.errors import ImageCorrupt, ImageTooNew

PAGE = 4096


def content(kind: str, length: int, seed: int) -> bytes:
    if kind == "zero":
        return bytes(length)
    if kind == "random":
        return random.Random(seed).randbytes(length)
    return (b"%08d" % seed * (length // 8 + 1))[:length]


def store(
    directory, files: dict[str, list[bytes]], *, levels=(-1, None, 3), order: int | None = None, checksums: bool = True
) -> Index:
    """Write frames over as many packs as there are levels: in turn, or with a seed in any order into any of them.

    Without `checksums` the index has none, as an older gpuckpt wrote it.
    """
    directory.mkdir(exist_ok=True)
    writers = [PackWriter(directory, number) for number, _ in enumerate(levels)]
    coders = [FrameCoder(level) for level in levels]
    todo = [
        (name, sum(map(len, pieces[:number])), piece)
        for name, pieces in files.items()
        for number, piece in enumerate(pieces)
    ]
    turns = [turn % len(levels) for turn, _ in enumerate(todo)]
    if order is not None:
        random.Random(order).shuffle(todo)
        turns = random.Random(order).choices(range(len(levels)), k=len(todo))
    placed: dict[str, list] = {name: [] for name in files}
    for (name, offset, piece), who in zip(todo, turns, strict=True):
        raw, digest = memoryview(piece), packs.digest_of(piece)
        if packs.is_zero(raw, digest):
            placed[name].append((offset, len(piece), packs.ZERO, 0, 0, False, digest))
            continue
        stored, compressed = coders[who].encode(raw)
        at = writers[who].append(stored)
        checksum = checksum_of(stored, compressed=compressed) if checksums else b""
        placed[name].append((offset, len(piece), who, at, len(stored), compressed, digest, checksum))
    finished = [writer.finish() for writer in writers]
    return packs.settled({name: [packs.Frame(*entry) for entry in sorted(placed[name])] for name in placed}, finished)


pieces = st.lists(
    st.tuples(st.sampled_from(["zero", "random", "text"]), st.integers(1, 3 * PAGE), st.integers(0, 9)),
    max_size=12,
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(files=st.lists(pieces, max_size=3), window=st.integers(0, 2**64 - 1), order=st.integers(0, 99))
def test_any_split_comes_back(tmp_path_factory, files, window, order):
    root = tmp_path_factory.mktemp("packs")
    raw = {f"pages-{n}.img": [content(*piece) for piece in wanted] for n, wanted in enumerate(files, 1)}
    made = store(root / "packs", raw, order=order)
    index = packs.decode(packs.encode(Index(made.packs, made.files, (Window(7, 0, window, window),))), "index")
    assert (index.packs, index.files) == (made.packs, made.files)
    assert index.windows == (Window(7, 0, window, window),)
    assert index.raw_bytes() == sum(len(piece) for each in raw.values() for piece in each)
    with PackReader(root / "packs", index) as reader:
        for name, wanted in raw.items():
            assert [bytes(reader.read(frame)) for frame in index.files[name]] == wanted
            assert [frame.offset for frame in index.files[name]] == [
                sum(map(len, wanted[:n])) for n in range(len(wanted))
            ]
        verify_all(reader, index)
        out = root / "out"
        out.mkdir()
        lean.write(out, lean.pages_files(index.files, None), reader)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == {n: b"".join(p) for n, p in raw.items()}
    for pack in index.packs:
        assert blake3.blake3((root / "packs" / pack.file).read_bytes()).hexdigest() == pack.name


@pytest.fixture(params=[True, False], ids=["checksums", "none"])
def image(tmp_path, request):
    files = {"pages-1.img": [content("random", 700, 1), bytes(9000), content("text", 20000, 2)], "pages-2.img": [b"x"]}
    index = store(tmp_path / "packs", files, levels=(-1, 1), checksums=request.param)
    return tmp_path / "packs", index


def test_every_flipped_byte_of_the_index_is_found(image):
    raw = packs.encode(image[1])
    for position in range(len(raw)):
        for bit in (1, 128):
            with pytest.raises((ImageCorrupt, ImageTooNew)):
                packs.decode(raw[:position] + bytes([raw[position] ^ bit]) + raw[position + 1 :], "index")


def test_every_cut_index_is_found(image):
    raw = packs.encode(image[1])
    for length in range(len(raw)):
        with pytest.raises(ImageCorrupt):
            packs.decode(raw[:length], "index")
    with pytest.raises(ImageCorrupt):
        packs.decode(raw + b"\0", "index")


def changed_is_corrupt(directory, index):
    """Some frame cannot be read, or its content is what it was: then only the pack's own digest can tell."""
    try:
        with PackReader(directory, index) as reader:
            for frame in (frame for frames in index.files.values() for frame in frames):
                reader.read(frame)
    except ImageCorrupt as error:
        assert "packs/" in error.message
        return True
    return False


def test_every_flipped_byte_of_a_pack_is_found(image):
    directory, index = image
    silent = 0
    for pack in index.packs:
        path = directory / pack.file
        # One byte in place: a file that is written anew waits for the disk each time.
        with path.open("r+b", buffering=0) as file:
            for position, byte in enumerate(path.read_bytes()):
                os.pwrite(file.fileno(), bytes([byte ^ 0x10]), position)
                silent += not changed_is_corrupt(directory, index)
                assert blake3.blake3(path.read_bytes()).hexdigest() != pack.name
                os.pwrite(file.fileno(), bytes([byte]), position)
    # Bits of a zstd header that mean nothing: the memory is what it was.
    assert silent <= 4
    assert not changed_is_corrupt(directory, index)


def _as_first_written(index: Index) -> bytes:
    """The index as version 1 had it: no keys, no checksums."""
    out = struct.pack("<8sIIII", b"GPUCKIDX", 1, len(index.packs), len(index.files), len(index.windows))
    out += b"".join(bytes.fromhex(pack.name) + struct.pack("<Q", pack.size) for pack in index.packs)
    for name, frames in index.files.items():
        out += struct.pack("<HI", len(name), len(frames)) + name.encode()
        for one in frames:
            out += struct.pack("<IiQIB32s", one.raw, one.pack, one.at, one.stored, one.compressed, one.digest)
    return out + blake3.blake3(out).digest()


def test_an_index_of_the_first_version_is_read_and_zstd_checks_its_frames(image):
    directory, index = image
    old = packs.decode(_as_first_written(index), "index")
    assert not any(frame.checksum for frames in old.files.values() for frame in frames)
    assert not changed_is_corrupt(directory, old)
    [packed] = [frame for frame in old.files["pages-1.img"] if frame.compressed]
    _flip_last_byte(directory, old, packed)
    with PackReader(directory, old) as reader, pytest.raises(ImageCorrupt, match="checksum"):
        reader.read(packed)


def test_a_checksum_that_was_altered_is_found_where_zstd_does_not_look(tmp_path):
    raw = content("text", 20000, 2)
    index = store(tmp_path / "packs", {"pages-1.img": [raw]}, levels=(-1,))
    index = packs.decode(packs.encode(index), "index")
    [frame] = index.files["pages-1.img"]
    assert len(frame.checksum) == 4
    for _ in range(2):
        with PackReader(tmp_path / "packs", index) as reader:
            assert reader.read(frame) == raw
    _flip_last_byte(tmp_path / "packs", index, frame)
    with PackReader(tmp_path / "packs", index) as reader, pytest.raises(ImageCorrupt, match="checksum was altered"):
        reader.read(frame)


@pytest.mark.parametrize("how", [3, 255])
def test_a_frame_that_is_stored_in_no_known_way_is_refused(tmp_path, how):
    index = store(tmp_path / "packs", {"pages-1.img": [content("text", 20000, 2)]}, levels=(-1,))
    body = bytearray(packs.encode(index)[:-32])
    body[-37] = how  # before the digest and the checksum of the last frame
    with pytest.raises(ImageCorrupt, match="unknown way"):
        packs.decode(bytes(body) + blake3.blake3(body).digest(), "index")


def test_an_index_of_no_version_is_refused(tmp_path):
    raw = bytearray(packs.encode(store(tmp_path / "packs", {"pages-1.img": [b"x"]}))[:-32])
    raw[8:12] = bytes(4)
    with pytest.raises(ImageCorrupt, match="version 0"):
        packs.decode(bytes(raw) + blake3.blake3(raw).digest(), "index")


def test_an_index_keeps_frames_of_which_the_checksum_is_not_known(tmp_path):
    """As a base of the first version gives them to a newer image."""
    index = store(tmp_path / "packs", {"pages-1.img": [content("text", 20000, 2)]}, levels=(-1,), checksums=False)
    assert packs.decode(packs.encode(index), "index") == index


def _flip_last_byte(directory, index, frame):
    with (directory / index.packs[frame.pack].file).open("r+b") as file:
        file.seek(frame.at + frame.stored - 1)
        last = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([last ^ 1]))


def test_cut_swapped_missing_and_linked_packs_are_found(image):
    directory, index = image
    first, second = (directory / pack.file for pack in index.packs)
    raw = first.read_bytes(), second.read_bytes()
    first.write_bytes(raw[0][:-1])
    assert changed_is_corrupt(directory, index)
    first.write_bytes(raw[1])
    second.write_bytes(raw[0])
    assert changed_is_corrupt(directory, index)
    second.write_bytes(raw[1])
    first.unlink()
    assert changed_is_corrupt(directory, index)
    (directory / "elsewhere").write_bytes(raw[0])
    first.symlink_to(directory / "elsewhere")
    assert changed_is_corrupt(directory, index)
    first.unlink()
    first.write_bytes(raw[0])
    assert not changed_is_corrupt(directory, index)


def test_swapped_frames_are_found(image):
    directory, index = image
    one, two, three = index.files["pages-1.img"]
    swapped = packs.Frame(one.offset, three.raw, three.pack, three.at, three.stored, three.compressed, one.digest)
    assert changed_is_corrupt(directory, Index(index.packs, {"pages-1.img": (swapped,)}))
    not_zero = packs.Frame(two.offset, two.raw, packs.ZERO, 0, 0, False, three.digest)
    assert changed_is_corrupt(directory, Index(index.packs, {"pages-1.img": (not_zero,)}))


@pytest.mark.parametrize(
    "change",
    [
        {"raw": 0},
        {"raw": packs.FRAME_BYTES + 1},
        {"pack": 2},
        {"pack": -2},
        {"at": 1 << 62},
        {"stored": 0},
        {"stored": (4 << 20) + 1},
        {"pack": packs.ZERO},
    ],
)
def test_impossible_frames_are_refused(image, change):
    _, index = image
    frame = index.files["pages-1.img"][2]
    values = {name: getattr(frame, name) for name in frame.__slots__} | change
    forged = packs.encode(Index(index.packs, {"pages-1.img": (packs.Frame(**values | {"offset": 0}),)}))
    with pytest.raises(ImageCorrupt):
        packs.decode(forged, "index")


@pytest.mark.parametrize("name", ["../pages-1.img", "pages-1.img/x", "core-1.img", "pages-.img", ""])
def test_names_of_other_files_are_refused(image, name):
    with pytest.raises(ImageCorrupt):
        packs.decode(packs.encode(Index(image[1].packs, {name: image[1].files["pages-2.img"]})), "index")


def test_a_link_is_no_index(tmp_path, image):
    (tmp_path / "real").write_bytes(packs.encode(image[1]))
    (tmp_path / "index").symlink_to(tmp_path / "real")
    with pytest.raises(ImageCorrupt):
        packs.read_index(tmp_path / "index")
    assert packs.read_index(tmp_path / "real").files == image[1].files


def test_many_threads_read_at_once(tmp_path):
    wanted = [content("text", 50000, n) for n in range(40)]
    index = store(tmp_path / "packs", {"pages-1.img": wanted})
    wrong = []
    with PackReader(tmp_path / "packs", index) as reader:

        def read(seed: int) -> None:
            order = list(enumerate(index.files["pages-1.img"]))
            random.Random(seed).shuffle(order)
            wrong.extend(n for n, frame in order if bytes(reader.read(frame)) != wanted[n])

        threads = [threading.Thread(target=read, args=(seed,)) for seed in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong


def test_an_empty_pack_is_removed(tmp_path):
    writer = PackWriter(tmp_path, 0)
    assert writer.finish() is None
    assert not list(tmp_path.iterdir())

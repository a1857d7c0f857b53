"""Keys of packs: each has its own, a pack taken over keeps its own, a rewritten one gets another; the index keeps them."""

from __future__ import annotations

import struct

import blake3
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpuckpt.images import framesource, packindex, packs, sharing
from gpuckpt.images.sealing import TAG_BYTES
from gpuckpt.model.errors import ImageCorrupt, ImageTooNew
from tests.images.test_capture import captured

KEY = bytes(range(32))


def pack(directory, pieces, digest_key=KEY):
    """One pack of pieces that are stored as they are, encrypted where there is a key."""
    directory.mkdir()
    writer, frames, offset = packs.PackWriter(directory, 0, encrypt=bool(digest_key)), [], 0
    for piece in pieces:
        at = writer.append(piece)
        digest = packs.digest_of(piece, digest_key)
        frames.append(packs.Frame(offset, len(piece), 0, at, writer.size - at, False, digest))
        offset += len(piece)
    return packs.settled({"pages-1.img": frames}, [writer.finish()], digest_key=digest_key)


def taken_over(base, frames, directory):
    """What a dump makes of these frames of the base."""
    directory.mkdir()
    moved = {"pages-1.img": tuple(packs.Frame(0, f.raw, 1, f.at, f.stored, f.compressed, f.digest) for f in frames)}
    return sharing.join(captured(moved), base, directory, base.index.digest_key)


def test_what_is_encrypted_comes_back_and_looks_like_nothing(tmp_path):
    pieces = [b"a" * 5000, b"b" * 3000]
    index = pack(tmp_path / "one", pieces)
    stored = (tmp_path / "one" / index.packs[0].file).read_bytes()
    assert b"aaaa" not in stored
    assert len(stored) == 8000 + 2 * TAG_BYTES
    with packs.PackReader(tmp_path / "one", index) as reader:
        framesource.verify_all(reader, index)
        assert [bytes(reader.read(frame)) for frame in index.files["pages-1.img"]] == pieces


def test_every_flipped_byte_of_a_pack_is_found(tmp_path):
    index = pack(tmp_path / "one", [b"ab" * 20, b"c" * 30])
    path = tmp_path / "one" / index.packs[0].file
    stored = path.read_bytes()
    for at in range(len(stored)):
        path.write_bytes(stored[:at] + bytes([stored[at] ^ 1]) + stored[at + 1 :])
        with packs.PackReader(tmp_path / "one", index) as reader, pytest.raises(ImageCorrupt, match="was altered"):
            framesource.verify_all(reader, index)


def test_equal_frames_of_two_packs_differ(tmp_path):
    one, two = (pack(tmp_path / name, [b"a" * 5000]) for name in ("one", "two"))
    assert one.packs[0].key != two.packs[0].key
    assert one.packs[0].name != two.packs[0].name


def test_a_pack_that_is_taken_over_keeps_its_key(tmp_path):
    made = pack(tmp_path / "one", [b"a" * 5000, b"b" * 5000])
    joined = taken_over(sharing.Base(tmp_path / "one", made, 1), made.files["pages-1.img"][:1], tmp_path / "two")
    assert joined.index.packs == made.packs
    assert joined.index.digest_key == KEY
    with packs.PackReader(tmp_path / "two", joined.index) as reader:
        assert bytes(reader.read(joined.index.files["pages-1.img"][0])) == b"a" * 5000


def test_a_pack_that_is_rewritten_gets_another_key(tmp_path):
    """Its frames lie elsewhere in it: under the old key a nonce would be used twice."""
    made = pack(tmp_path / "one", [b"a" * 5000, b"b" * 5000, b"c" * 5000])
    joined = taken_over(sharing.Base(tmp_path / "one", made, 1), made.files["pages-1.img"][1:2], tmp_path / "two")
    [rewritten] = joined.index.packs
    assert rewritten.key not in (b"", made.packs[0].key)
    assert rewritten.size == 5000 + TAG_BYTES
    with packs.PackReader(tmp_path / "two", joined.index) as reader:
        assert bytes(reader.read(joined.index.files["pages-1.img"][0])) == b"b" * 5000


def test_the_index_keeps_the_keys_and_one_without_has_none(tmp_path):
    sealed, plain = pack(tmp_path / "one", [b"a" * 50]), pack(tmp_path / "two", [b"a" * 50], b"")
    assert packindex.decode(packindex.encode(sealed), "index") == sealed
    raw = packindex.encode(plain)
    assert struct.unpack_from("<I", raw, 8) == (3,)
    assert packindex.decode(raw, "index") == plain


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_an_index_that_lies_is_refused_or_leads_nowhere_else(tmp_path_factory, data):
    """Whatever bytes are changed or cut, with a digest that fits: no frame outside its pack, no pack without a key."""
    made = packindex.Index(
        (packindex.PackFile("ab" * 32, 5000, KEY),),
        {"pages-1.img": (packindex.Frame(0, 4096, 0, 16, 4096 + TAG_BYTES, False, KEY),)},
        (packindex.Window(1, 0, 4096, 0),),
        KEY,
    )
    raw = bytearray(packindex.encode(made)[:-32])
    for at, value in data.draw(st.lists(st.tuples(st.integers(0, len(raw) - 1), st.integers(0, 255)), max_size=4)):
        raw[at] = value
    raw = raw[: data.draw(st.integers(0, len(raw)) | st.just(len(raw)))]
    try:
        found = packindex.decode(bytes(raw) + blake3.blake3(raw).digest(), "index")
    except (ImageCorrupt, ImageTooNew):
        return
    for frames in found.files.values():
        for frame in frames:
            assert frame.pack == packs.ZERO or frame.at + frame.stored <= found.packs[frame.pack].size
    assert all(len(one.key) == len(found.digest_key) for one in found.packs)


def test_cut_in_a_key(tmp_path):
    raw = packindex.encode(pack(tmp_path / "one", [b"a" * 50]))[:-32][:40]
    with pytest.raises(ImageCorrupt):
        packindex.decode(raw + blake3.blake3(raw).digest(), "index")

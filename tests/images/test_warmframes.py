"""Frames that were unpacked ahead: the same bytes, only of the same frames, and never more than there is room for."""

from __future__ import annotations

import pytest
from test_packs import content, store

from gpuckpt.images import packindex, warmframes
from gpuckpt.images.framesource import carry_out
from gpuckpt.images.packs import PackReader
from gpuckpt.images.warmframes import WarmFrames
from gpuckpt.model.errors import ImageCorrupt

PIECES = [content("random", 8192, 1), content("text", 16384, 2), content("zero", 4096, 0), content("random", 8192, 3)]
STORED = 8192 + 16384 + 8192


def image(place, pieces):
    """Packs with their index, as they lie in an image."""
    index = store(place, {"pages-1.img": pieces})
    (place / "index").write_bytes(packindex.encode(index))
    return index


def read_all(source, index) -> dict[int, bytes]:
    """Offset -> the bytes that come."""
    found = {}
    works = [(frame, frame.offset) for frame in index.files["pages-1.img"]]

    def acting(buffer):
        def keep(frame, offset):
            found[offset] = buffer[: frame.raw]

        return keep

    carry_out(source, works, 1, acting, lambda: None)
    return found


def test_warm_frames_are_not_read_again_and_others_are(tmp_path):
    image(tmp_path / "old", PIECES)
    new = [*PIECES[:3], content("random", 8192, 4)]
    index = image(tmp_path / "new", new)
    found = warmframes.warm(tmp_path / "old", 1 << 20, lambda: None)
    assert sum(size for _, size in found) == STORED
    with PackReader(tmp_path / "new", index) as reader:
        # Nothing of what is warm is left in the packs: who reads it there sees damage.
        for frame in index.files["pages-1.img"][:2]:
            damage(tmp_path / "new", index, frame)
        got = read_all(WarmFrames(reader, index, found), index)
        assert got == {0: new[0], 8192: new[1], 28672: new[3]}
        with pytest.raises(ImageCorrupt):
            read_all(WarmFrames(reader, index, {}), index)


def damage(place, index, frame):
    """Overwrite the stored bytes of a frame."""
    path = place / f"{index.packs[frame.pack].name}.zst"
    path.chmod(0o600)
    with path.open("r+b") as file:
        file.seek(frame.at)
        file.write(bytes(frame.stored))


@pytest.mark.parametrize(("room", "warm"), [(-1, 0), (0, 0), (8192, 8192), (8192 + 16384, 8192 + 16384)])
def test_no_more_than_there_is_room_for(tmp_path, room, warm):
    image(tmp_path / "old", PIECES)
    assert sum(size for _, size in warmframes.warm(tmp_path / "old", room, lambda: None)) == warm


def test_a_damaged_frame_is_not_warm(tmp_path):
    index = image(tmp_path / "old", PIECES)
    damage(tmp_path / "old", index, index.files["pages-1.img"][1])
    with pytest.raises(ImageCorrupt):
        warmframes.warm(tmp_path / "old", 1 << 20, lambda: None)

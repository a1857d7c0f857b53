"""An image whose memory lies in packs, out of one with plain pages files; and damage to a frame of it."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

from gpuckpt.images.decoding import Decoder
from gpuckpt.images.encoding import FrameCoder, checksum_of
from gpuckpt.images.packs import (
    FRAME_BYTES,
    ZERO,
    Frame,
    Index,
    PackWriter,
    digest_of,
    encode,
    is_zero,
    read_index,
)
from gpuckpt.model import manifest as manifests
from gpuckpt.model.errors import ImageCorrupt
from gpuckpt.stores import directory


def pack(image: Path, level: int | None = -1, frame_bytes: int = FRAME_BYTES) -> Path:
    """Put the pages of an image into a pack, in place; one that has packs already stays as it is."""
    path = image / manifests.NAME
    manifest = manifests.decode(path.read_bytes(), str(path))
    if "packs" in manifest.requires:
        return image
    (image / "packs").mkdir(mode=0o700)
    writer, coder, files = PackWriter(image / "packs", 0), FrameCoder(level), {}
    for pages in sorted((image / "criu").glob("pages-*.img")):
        files[pages.name] = tuple(_frames(pages.read_bytes(), writer, coder, frame_bytes))
        pages.unlink()
    finished = writer.finish()
    index = image / "packs" / "index"
    index.write_bytes(encode(Index((finished,) if finished else (), files)))
    index.chmod(0o600)
    path.unlink()
    parts = tuple(one for one in directory.describe_parts(image) if one.path not in directory.NOT_DIGESTED)
    path.write_bytes(manifests.encode(replace(manifest, parts=parts, requires=("packs",))))
    path.chmod(0o600)
    return image


def _frames(raw: bytes, writer: PackWriter, coder: FrameCoder, frame_bytes: int):
    for offset in range(0, len(raw), frame_bytes):
        part = memoryview(raw)[offset : offset + frame_bytes]
        digest = digest_of(part)
        if is_zero(part, digest):
            yield Frame(offset, len(part), ZERO, 0, 0, False, digest)
            continue
        stored, compressed = coder.encode(part)
        checksum = checksum_of(stored, compressed=compressed)
        yield Frame(offset, len(part), 0, writer.append(stored), len(stored), compressed, digest, checksum)


def flip(image: Path, share: float = 0.5) -> str:
    """Flip one bit in the frame at this share of the memory; returns the name of its pack."""
    index = read_index(image / "packs" / "index")
    frames = [frame for found in index.files.values() for frame in found if frame.pack != ZERO]
    return _spoil(image, index, frames[int(share * (len(frames) - 1))])


def flip_in_pack(pack: Path) -> None:
    """Flip one bit in the middle one of the frames of a pack of an image."""
    image = pack.parents[1]
    index = read_index(image / "packs" / "index")
    number = [one.file for one in index.packs].index(pack.name)
    frames = [frame for found in index.files.values() for frame in found if frame.pack == number]
    _spoil(image, index, frames[len(frames) // 2])


def largest_pack(image: Path) -> Path:
    """The one with the most bytes."""
    return max((image / "packs").glob("*.zst"), key=lambda path: path.stat().st_size)


def _spoil(image: Path, index: Index, frame: Frame) -> str:
    """Flip a bit that means something: about one in a hundred of a zstd frame names the same bytes another way."""
    name = index.packs[frame.pack].file
    decoder = Decoder(index)
    with (image / "packs" / name).open("r+b") as file:
        whole = os.pread(file.fileno(), frame.stored, frame.at)
        for position in range(frame.stored // 2, frame.stored):
            changed = bytes([whole[position] ^ 4])
            stored = memoryview(whole[:position] + changed + whole[position + 1 :])
            try:
                decoder.decode(frame, stored, memoryview(bytearray(frame.raw)))
            except ImageCorrupt:
                os.pwrite(file.fileno(), changed, frame.at + position)
                return name
    raise AssertionError(f"no bit of the second half of the frame at {frame.at} means anything")


def described(image: Path) -> dict:
    """The manifest as JSON."""
    return json.loads((image / manifests.NAME).read_text())

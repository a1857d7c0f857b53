"""Images made without CRIU: real packs, a real index, a manifest that fits; what is in them is random."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

from gpuckpt.images.encoding import FrameCoder, checksum_of
from gpuckpt.images.packs import Frame, Index, PackWriter, digest_of, encode
from gpuckpt.model import manifest as manifests
from gpuckpt.stores import directory
from tests.cli.cli_samples import manifest as sample_manifest

FRAME_BYTES = 4 << 20
MIB = 1 << 20


def make_image(
    path: Path, megabytes: float = 6, *, seed: int = 1, packs: int = 2, entropy: float = 1.0, base: Path | None = None
) -> Path:
    """An image with `packs` packs of memory; `entropy` is the share of random bytes. Packs of `base` are linked in."""
    path.mkdir(mode=0o700)
    for name in ("criu", "packs", "files"):
        (path / name).mkdir(mode=0o700)
    chance = random.Random(seed)
    for name, size in (("inventory.img", 40), ("pstree.img", 200), ("core-42.img", 5000), ("empty.img", 0)):
        _write(path / "criu" / name, chance.randbytes(size))
    _write(path / "files" / "log", chance.randbytes(70_000))
    written, files = [], {}
    for number in range(packs):
        frames, pack = _pack(path / "packs", number, int(megabytes * MIB / packs), chance, entropy)
        files[f"pages-{number + 1}.img"] = tuple(replace(frame, pack=len(written)) for frame in frames)
        written.append(pack)
    for pack in sorted((base / "packs").glob("*.zst")) if base else ():
        (path / "packs" / pack.name).hardlink_to(pack)
    _write(path / "packs" / "index", encode(Index(tuple(written), files)))
    parts = directory.describe_parts(path)
    stored = directory.sizes(parts)
    made = replace(
        sample_manifest(), image_id=f"{seed:032x}", parts=parts, captured=(), requires=("packs",), bytes_stored=stored
    )
    _write(path / manifests.NAME, manifests.encode(made))
    return path


def _pack(where: Path, number: int, size: int, chance: random.Random, entropy: float):
    writer, coder, frames, offset = PackWriter(where, number), FrameCoder(-1), [], 0
    while offset < size:
        length = min(FRAME_BYTES, size - offset)
        raw = memoryview(_content(length, chance, entropy))
        stored, compressed = coder.encode(raw)
        digest, checksum = digest_of(raw), checksum_of(stored, compressed=compressed)
        frames.append(Frame(offset, length, 0, writer.append(stored), len(stored), compressed, digest, checksum))
        offset += length
    return frames, writer.finish()


def _content(length: int, chance: random.Random, entropy: float) -> bytes:
    noise = int(length * entropy)
    return chance.randbytes(noise) + bytes(length - noise)


def _write(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    path.chmod(0o600)


def content_of(image: Path) -> dict[str, bytes]:
    """Every file of an image that travels."""
    own = directory.NOT_DIGESTED - {manifests.NAME}
    return {
        str(path.relative_to(image)): path.read_bytes()
        for path in sorted(image.rglob("*"))
        if path.is_file() and path.name not in own
    }

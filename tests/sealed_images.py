"""Keys for encrypted images, and what such images are tested with."""

from __future__ import annotations

import random
import shutil
from dataclasses import replace
from pathlib import Path

import pyrage

from gpuckpt.flows.sealing import Sealing
from gpuckpt.images.encoding import FrameCoder
from gpuckpt.images.packs import ZERO, Frame, Index, PackWriter, digest_of, encode
from gpuckpt.model import manifest as manifests
from gpuckpt.model.manifest import Part
from gpuckpt.stores import directory, partialimage
from tests.cli.cli_samples import manifest as sample_manifest

SECRET = b"the secret of the job"


def age_key(path: Path) -> tuple[Path, str]:
    """Make an age identity as age-keygen does; returns its file and the recipient."""
    identity = pyrage.x25519.Identity.generate()
    path.write_text(f"# public key: {identity.to_public()}\n{identity}\n")
    path.chmod(0o600)
    return path, str(identity.to_public())


def make_sealed(path: Path, recipient: str, *, seed: int = 1) -> Path:
    """An encrypted image without CRIU, as a dump makes it; what is in it is random but for SECRET in each file."""
    hidden, chance = path.with_name(f"{path.name}.hidden"), random.Random(seed)
    for place in (path, path / "packs", hidden, hidden / "criu", hidden / "files", hidden / "packs"):
        place.mkdir(mode=0o700)
    sealing = Sealing.of((recipient,))
    assert sealing is not None
    index = _index(path / "packs", chance, sealing.digest_key)
    (hidden / "packs" / "index").write_bytes(encode(index))
    for name in ("criu/inventory.img", "criu/core-42.img", "files/log"):
        (hidden / name).write_bytes(SECRET + chance.randbytes(5000))
    partial = partialimage.PartialImage(path, path, -1, secret=hidden)
    packs = [Part(f"packs/{pack.file}", pack.size, pack.name) for pack in index.packs]
    parts = tuple(sorted((*directory.describe_parts(hidden), *packs), key=lambda part: part.path))
    stored = sealing.seal(partial, parts, lambda: None)
    whole = replace(
        sample_manifest(), image_id=sealing.image_id, parts=parts, captured=(), requires=("packs",), notes=("a note",)
    )
    (path / manifests.NAME).write_bytes(manifests.encode(sealing.manifest(partial, whole, stored)))
    (path / manifests.NAME).chmod(0o600)
    shutil.rmtree(hidden)
    return path


def _index(where: Path, chance: random.Random, digest_key: bytes) -> Index:
    """Two packs: frames that compress, one that does not, one of zeros."""
    finished, files = [], {}
    for number in range(2):
        writer, coder, frames, offset = PackWriter(where, number, encrypt=True), FrameCoder(-1), [], 0
        for raw in (SECRET * 900, chance.randbytes(9000), bytes(4096), chance.randbytes(100) * 90):
            digest = digest_of(raw, digest_key)
            if any(raw):
                stored, compressed = coder.encode(memoryview(raw))
                at = writer.append(stored)
                frames.append(Frame(offset, len(raw), number, at, writer.size - at, compressed, digest))
            else:
                frames.append(Frame(offset, len(raw), ZERO, 0, 0, False, digest))
            offset += len(raw)
        finished.append(writer.finish())
        files[f"pages-{number + 1}.img"] = tuple(frames)
    return Index(tuple(finished), files, (), digest_key)


def reforge(image: Path, **changes: object) -> None:
    """Make the open manifest fit what lies there now: whoever has the files can do that without any key."""
    path = image / manifests.NAME
    manifest = manifests.decode(path.read_bytes(), str(path))
    own = directory.NOT_DIGESTED
    parts = tuple(part for part in directory.describe_parts(image) if part.path not in own)
    path.write_bytes(manifests.encode(replace(manifest, **{"parts": parts, **changes})))

"""What a dump takes over from a base image: frames it holds already, by the packs they lie in.

A pack of the base is hard-linked under its own name. Across file systems it is copied; a pack of which
less than half is still used is rewritten, its used frames as they are. So an image never needs its base.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import field, replace
from typing import TYPE_CHECKING

from gpuckpt.images.captureworker import Place
from gpuckpt.images.packindex import ZERO, Frame, Index, PackFile, settled
from gpuckpt.images.packs import PackReader, PackWriter
from gpuckpt.model.errors import ImageCorrupt
from gpuckpt.model.records import dataclass

if TYPE_CHECKING:
    from pathlib import Path

    from gpuckpt.images.capture import Captured

REWRITE_BELOW = 0.5
"""A pack of which less is used is not worth the room the rest takes."""


@dataclass(frozen=True, slots=True)
class Base:
    """An image whose frames need not be written again. It stays open, locked against removal, until the end."""

    packs: Path
    index: Index
    first: int
    """Its packs are numbered from here on, behind those of the workers."""

    def known(self) -> dict[bytes, Place]:
        """Its frames, by the digest of their raw bytes."""
        return {
            frame.digest: Place(self.first + frame.pack, frame.at, frame.stored, frame.compressed, frame.checksum)
            for frames in self.index.files.values()
            for frame in frames
            if frame.pack != ZERO
        }


@dataclass(slots=True)
class Joined:
    """The packs of a capture and those of its base, in one directory."""

    index: Index
    written: int = 0
    """Bytes of packs that were written."""
    shared: int = 0
    """Bytes of packs that were linked to the base's."""
    notes: list[str] = field(default_factory=list)


def join(
    captured: Captured, base: Base | None, directory: Path, digest_key: bytes = b"", *, elsewhere: bool = False
) -> Joined:
    """Bring what the frames of a capture need of its base into `directory`, and make the index.

    `digest_key` is that of the capture, and of the base: digests are compared with the base's.
    With `elsewhere` the packs are on another host, which has the base's too and brings them together itself.
    Raises OSError, ImageCorrupt.
    """
    windows = [window for cuts in captured.cuts for window in cuts.windows]
    packs: list[PackFile | None] = list(captured.packs)
    joined = Joined(settled({}, []), written=sum(pack.size for pack in packs if pack is not None))
    files: dict[str, tuple[Frame, ...]] = captured.files
    if base is not None:
        packs += base.index.packs
        if elsewhere:
            joined.shared = sum(base.index.packs[number - base.first].size for number in _used(files, base.first))
        else:
            files = _take_over(files, packs, base, directory, joined)
    joined.index = settled(files, packs, windows, digest_key)
    return joined


def _take_over(
    files: dict[str, tuple[Frame, ...]], packs: list[PackFile | None], base: Base, directory: Path, joined: Joined
) -> dict[str, tuple[Frame, ...]]:
    """Link, copy or rewrite each pack of the base that is used; returns the frames where they lie now."""
    used = _used(files, base.first)
    thin: list[Frame] = []
    for number, frames in used.items():
        pack = base.index.packs[number - base.first]
        if sum(frame.stored for frame in frames) < REWRITE_BELOW * pack.size:
            thin += frames
        else:
            _link(base.packs / pack.file, directory / pack.file, pack, joined)
    if not thin:
        return files
    moved = _rewrite(thin, packs, base, directory, joined)
    return {
        name: tuple(
            replace(frame, pack=place.pack, at=place.at)
            if (place := moved.get((frame.pack, frame.at))) is not None
            else frame
            for frame in frames
        )
        for name, frames in files.items()
    }


def _used(files: dict[str, tuple[Frame, ...]], first: int) -> dict[int, list[Frame]]:
    """The frames that lie in packs of the base, each once, by pack."""
    distinct = {(frame.pack, frame.at): frame for frames in files.values() for frame in frames if frame.pack >= first}
    used: dict[int, list[Frame]] = {}
    for (pack, _), frame in sorted(distinct.items()):
        used.setdefault(pack, []).append(frame)
    return used


def _link(source: Path, target: Path, pack: PackFile, joined: Joined) -> None:
    if target.exists():
        return  # a worker wrote the very same
    try:
        os.link(source, target, follow_symlinks=False)
        joined.shared += pack.size
    except OSError as error:
        if isinstance(error, FileNotFoundError):
            raise
        # Another file system, one without hard links, or a file with too many.
        shutil.copyfile(source, target, follow_symlinks=False)
        target.chmod(0o600)
        if target.stat().st_size != pack.size:
            raise ImageCorrupt(f"{source} has changed while it was copied", "dump without --base") from None
        joined.written += pack.size
        note = f"packs of the base were copied, not linked ({error.strerror})"
        joined.notes += [note] if note not in joined.notes else []


def _rewrite(
    thin: list[Frame], packs: list[PackFile | None], base: Base, directory: Path, joined: Joined
) -> dict[tuple[int, int], Place]:
    """Put the used frames of thin packs into a new one; returns where each old (pack, at) lies now."""
    number = len(packs)
    # A pack of its own has a key of its own: its frames lie elsewhere in it than in the old one.
    writer = PackWriter(directory, number, encrypt=bool(base.index.digest_key))
    moved: dict[tuple[int, int], Place] = {}
    try:
        with PackReader(base.packs, base.index) as reader:
            for frame in thin:
                of_base = replace(frame, pack=frame.pack - base.first)
                at = writer.append(reader.content(of_base))
                moved[frame.pack, frame.at] = Place(number, at, frame.stored, frame.compressed)
        pack = writer.finish()
    except BaseException:
        writer.discard()
        raise
    packs.append(pack)
    joined.written += pack.size if pack is not None else 0
    return moved

"""The directory that CRIU reads at a restore: links to the verified small files, changed copies of a few, and pages.

An image whose pages lie in packs gets pages files made for it: only of what CRIU must restore itself
where the rest is injected, else of everything. They are as small as can be, lie in memory when they
fit there, and go as soon as the tree is up.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from gpuckpt.flows import gather
from gpuckpt.images import criuformat, lean, memory
from gpuckpt.images.advice import advise_huge_pages
from gpuckpt.images.packindex import read_index
from gpuckpt.model.errors import RestoreFailed
from gpuckpt.model.records import dataclass

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from gpuckpt.images.framesource import FrameSource
    from gpuckpt.images.memory import MemoryPlan, Range
    from gpuckpt.images.packindex import Index
    from gpuckpt.stores.directory import Image

PACKS = "packs"
"""The directory of packs in an image, and the feature in its manifest."""

WORTH_INJECTING = 32 << 20
"""Below this the tree is up as fast through CRIU alone, and no SIGCONT reaches the program. Bytes."""

SMALL_BYTES = 64 << 20
"""So much lies in the run directory, wherever that is: it stays in the page cache."""

MEMORY_SHARE = 4
"""Pages files may take one part in so many of the free memory: the tree itself needs the rest."""

IN_MEMORY = Path("/dev/shm")  # noqa: S108 - a directory of our own below it, with an unguessable name


class PackedMemory:
    """The memory of an image that lies in packs, open for reading."""

    def __init__(self, image: Image, open_frames: Callable[[Index], FrameSource]) -> None:
        """`open_frames`: where the frames come from. Raises ImageCorrupt, ImageTooNew, and what that raises."""
        self.index: Index = read_index(image.part(PACKS) / "index")
        self.reader: FrameSource = open_frames(self.index)

    def close(self) -> None:
        """Let the frames go."""
        self.reader.close()

    def plan(self, criu: Path, huge: Mapping[int, Sequence[Range]]) -> MemoryPlan:
        """What could be injected of it; for `huge` see memory.plan. Raises ImageCorrupt."""
        return memory.plan(criu, self.index.files, self.reader, huge=huge)


def is_packed(image: Image) -> bool:
    """Whether the pages of an image lie in packs."""
    return PACKS in image.manifest.requires


@dataclass(frozen=True, slots=True)
class LeanDirectory:
    """What was prepared for CRIU."""

    path: Path
    plan: MemoryPlan | None
    """What is not in it and must be injected; None where CRIU restores everything."""
    bytes_by_criu: int

    @property
    def bytes_injected(self) -> int:
        """What CRIU does not see."""
        return self.plan.bytes_injected if self.plan is not None else 0

    def remove_pages(self) -> None:
        """CRIU has read them: give the room back while the tree goes on."""
        for path in self.path.glob("pages-*.img"):
            path.unlink(missing_ok=True)


@dataclass(frozen=True, slots=True)
class Preparation:
    """All that the making of a lean directory depends on."""

    image: Image
    run_directory: Path
    packed: PackedMemory | None
    plan: MemoryPlan | None
    huge: Mapping[int, Sequence[Range]]
    """What is injected into huge pages, of each process (its pid in the image)."""
    free_memory_bytes: int | None
    edit_files: Callable[[bytes], bytes]
    """What CRIU shall find in files.img."""
    going_on: Callable[[], None]
    seen_as: Path
    """Under which name CRIU sees the image."""
    secret: Path | None = None
    """Where it must lie, as the image is encrypted: in memory, whatever its size."""

    def make(self) -> LeanDirectory:
        """Make it. Raises ImageCorrupt, RestoreFailed (no room), OSError, and what `going_on` raises."""
        if self.packed is None:
            path = self.run_directory / "images"
            path.mkdir(mode=0o700)
            self._link(path)
            pages = (part.size for part in self.image.manifest.parts if part.path.startswith("criu/pages-"))
            return LeanDirectory(path, None, sum(pages))
        files = lean.pages_files(self.packed.index.files, self.plan)
        size = sum(file.size for file in files)
        path = self._place(size)
        self._link(path)
        for one in self.plan.processes if self.plan is not None else ():
            _replace(path / f"pagemap-{one.pid}.img", one.split.pagemap)
            if one.pid in self.huge:
                name = f"mm-{one.pid}.img"
                raw = self.image.part(f"criu/{name}").read_bytes()
                _replace(path / name, advise_huge_pages(raw, self.huge[one.pid], name))
        lean.write(path, files, self.packed.reader, self.going_on)
        return LeanDirectory(path, self.plan, size)

    def _link(self, lean_directory: Path) -> None:
        """Links to the verified parts and nothing else, so that no stray file of the image reaches CRIU."""
        for part in self.image.manifest.parts:
            folder, _, name = part.path.partition("/")
            if folder == "criu" and "/" not in name:
                (lean_directory / name).symlink_to(self.seen_as / part.path)
        files = lean_directory / criuformat.FILES
        raw = self.image.part(f"criu/{criuformat.FILES}").read_bytes()
        edited = self.edit_files(raw)
        if edited != raw:
            _replace(files, edited)

    def _place(self, size: int) -> Path:
        """The directory, with room for pages files of `size` bytes; the run directory knows it as `images`."""
        link = self.run_directory / "images"
        if self.secret is not None:
            return self._secret_place(link, self.secret, size)
        if size <= SMALL_BYTES:
            link.mkdir(mode=0o700)
            return link
        fits = size <= (self.free_memory_bytes or 0) // MEMORY_SHARE and size <= (gather.free_bytes(IN_MEMORY) or 0)
        parent = IN_MEMORY if fits else Path(os.environ.get("GPUCKPT_TMPDIR") or self.image.path.parent)
        if not fits and size > (gather.free_bytes(parent) or 0):
            raise RestoreFailed(
                f"{parent} has no room for the {size >> 20} MiB of memory that CRIU must read from files",
                "name a directory with room in GPUCKPT_TMPDIR",
            )
        place = parent / f"gpuckpt-{self.run_directory.name}"
        # The link first: whoever removes the run directory, after a crash too, finds what lies elsewhere by it.
        link.symlink_to(place)
        place.mkdir(mode=0o700)
        return link

    def _secret_place(self, link: Path, secret: Path, size: int) -> Path:
        if size > (self.free_memory_bytes or 0) // MEMORY_SHARE or size > (gather.free_bytes(secret) or 0):
            raise RestoreFailed(
                f"the {size >> 20} MiB that CRIU must read from files have no room in memory, and of an encrypted "
                "image they may lie nowhere else",
                f"make {secret.parent} larger; without --plain it is less",
            )
        place = secret / "lean"
        link.symlink_to(place)
        place.mkdir(mode=0o700)
        return link


def _replace(link: Path, content: bytes) -> None:
    """Replace the link to a part of the image by a changed copy; the image itself never changes."""
    link.unlink()
    descriptor = os.open(link, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as out:
        out.write(content)

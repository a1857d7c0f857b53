"""What inspect finds out beyond a manifest: what memory holds, how two images differ, what a directory of images holds.

Sizes are bytes.
"""

from __future__ import annotations

from dataclasses import field

from gpuckpt.model.records import dataclass


@dataclass(frozen=True, slots=True)
class Copy:
    """A verified copy of an image."""

    host: str
    path: str
    time: float
    verified: str
    """By what."""


@dataclass(frozen=True, slots=True)
class ListedImage:
    """An image of a directory. None where it is not known: of a damaged image, or because the disk is not seen."""

    name: str
    path: str
    complete: bool
    latest: bool
    image_id: str | None = None
    created: float | None = None
    damage: str | None = None
    verified: bool | None = None
    generation: int | None = None
    bytes_raw: int | None = None
    bytes_stored: int | None = None
    bytes_on_disk: int | None = None
    bytes_unshared: int | None = None
    """What it adds on the disk."""
    copies: int | None = None
    """How many images up to it share no file with each other."""
    program: str | None = None
    root_pid: int | None = None
    host: str | None = None
    protected: tuple[Copy, ...] = ()


@dataclass(frozen=True, slots=True)
class ListedSeries:
    """A series, newest image first; '' for images with other names."""

    name: str
    images: tuple[ListedImage, ...]


@dataclass(frozen=True, slots=True)
class Listing:
    """A directory of images."""

    path: str
    latest: str | None
    """What the link of that name leads to."""
    series: tuple[ListedSeries, ...]
    bytes_on_disk: int | None = None
    left_out: int = 0
    """Images that were not looked at, because there are too many."""


@dataclass(frozen=True, slots=True)
class Block:
    """A piece of a picture: so much memory, one after the other."""

    held: int
    stored: int


@dataclass(frozen=True, slots=True)
class MemoryKind:
    """All memory of one kind in an image."""

    kind: str
    """One of KINDS."""
    held: int
    """As the processes have it."""
    zero: int
    """Of that, all zero: nothing is stored of it."""
    stored: int
    """What it takes in the image."""
    blocks: tuple[Block, ...] = ()
    """All of it in the order of processes and addresses, each but the last MemoryPicture.block_bytes long."""


@dataclass(frozen=True, slots=True)
class ProcessMemory:
    """The memory of one process; shared memory belongs to none."""

    pid: int
    held: int
    stored: int


@dataclass(frozen=True, slots=True)
class MemoryPicture:
    """What is where in the memory of an image."""

    block_bytes: int
    kinds: tuple[MemoryKind, ...]
    processes: tuple[ProcessMemory, ...]


KINDS = ("heap", "anonymous", "GPU copy", "stacks", "files", "shared", "special")
"""The heap of brk; large areas of mmap and malloc; what the driver copied from the GPU; stacks of processes and of
threads; private pages of mapped files; shared memory, memfd and System V's; the rest (vdso, aio rings …)."""


@dataclass(frozen=True, slots=True)
class MemoryChange:
    """How much of one kind of memory is not in the other image."""

    kind: str
    held: int
    other_held: int
    changed: int | None
    """By the digests of its frames; None where an image has none (--plain)."""


@dataclass(frozen=True, slots=True)
class Difference:
    """One thing that two images do not have alike; '' where one has nothing of it."""

    group: str
    """'processes', 'files', 'sockets', 'GPUs', 'versions', 'environment', 'image'."""
    name: str
    other: str
    here: str


@dataclass(frozen=True, slots=True)
class Comparison:
    """How an image differs from another."""

    other: str
    """Its path."""
    image_id: str
    created: float
    differences: tuple[Difference, ...]
    memory: tuple[MemoryChange, ...] = field(default=())

"""What inspect finds out beyond the manifest: what memory holds, and how two images differ. Sizes are bytes."""

from __future__ import annotations

from dataclasses import field

from gpuckpt.model.records import dataclass


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

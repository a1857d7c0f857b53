"""Open descriptors of a process, and GPU device files and io_uring rings among them and its mappings."""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING

from gpuckpt.model.facts import Descriptor, FdKind, GpuMapping
from gpuckpt.model.records import dataclass
from gpuckpt.system.procfs.reading import (
    DEV_ZERO,
    Mapping,
    list_numbers,
    maps_of,
    read_link,
    read_text,
    stat_path,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

DELETED = " (deleted)"
PTY_SLAVES = range(136, 144)
TTY_MAJORS = frozenset((4, 5, 166, 188, 204, 229, *PTY_SLAVES))
"""Documentation/admin-guide/devices.txt: consoles, serial lines (USB and hypervisor too) and Unix98 pty slaves."""
PTMX = os.makedev(5, 2)
NVIDIA_MAJOR = 195
GPU_NAMES = ("/dev/nvidia", "/dev/gdrdrv")
GPU_DRIVERS = ("nvidia", "gdrdrv")
UVM = "/dev/nvidia-uvm"
MANAGED_FROM = 1 << 44
"""Every CUDA process has one mapping of that file, of 2 MiB, where the driver keeps its own (0x204a00000); what
cudaMallocManaged gives lies where mmap puts mappings, high. Seen with driver 580.159 on an H200: 17 kinds of programs
without managed memory (CUDA C, PyTorch, JAX, CuPy, Numba) had only the first, three with it had both."""
NOT_FILES = ("/memfd:", "/secretmem", "/dmabuf:")
"""Kernel objects whose link looks like a path."""
IO_URING = "anon_inode:[io_uring]"


@dataclass(frozen=True, slots=True)
class OpenDescriptor:
    """A descriptor with what the facts do not carry but their making needs."""

    fact: Descriptor
    stat: os.stat_result
    locked: bool
    """A POSIX, flock or lease lock is held through it."""
    tty_index: int | None
    """For a pty master: the number of its slave."""

    @property
    def readable(self) -> bool:
        """Opened for reading."""
        return self.fact.flags & os.O_ACCMODE != os.O_WRONLY

    @property
    def writable(self) -> bool:
        """Opened for writing."""
        return self.fact.flags & os.O_ACCMODE != os.O_RDONLY


def descriptors_of(pid: int) -> list[OpenDescriptor]:
    """The open descriptors of a process, ascending; empty when it is gone. Raises PermissionError."""
    found = (_descriptor(pid, fd) for fd in list_numbers(f"/proc/{pid}/fd"))
    return [descriptor for descriptor in found if descriptor is not None]


def _descriptor(pid: int, fd: int) -> OpenDescriptor | None:
    path = f"/proc/{pid}/fd/{fd}"
    target, status, info = read_link(path), stat_path(path), read_text(f"/proc/{pid}/fdinfo/{fd}")
    if target is None or status is None or info is None:
        return None
    lines = [line.partition(":")[::2] for line in info.split("\n")]
    values = {name: value.strip() for name, value in lines}
    kind = kind_of(target, status)
    index = values.get("tty-index")
    fact = Descriptor(
        fd=fd,
        kind=kind,
        target=target,
        flags=int(values.get("flags", "0"), 8),
        position=int(values.get("pos", "0")),
        device=status.st_rdev if kind in {"tty", "device"} else status.st_dev,
        inode=status.st_ino,
        deleted=is_deleted(pid, target, status),
    )
    return OpenDescriptor(fact, status, "lock" in values, int(index) if index else None)


def kind_of(target: str, status: os.stat_result) -> FdKind:
    """What a descriptor is, from its link text and its stat."""
    mode = status.st_mode
    if target.startswith("/memfd:"):
        return "memfd"
    if stat.S_ISFIFO(mode):
        return "pipe" if target.startswith("pipe:[") else "fifo"
    if stat.S_ISSOCK(mode):
        return "socket"
    if stat.S_ISDIR(mode):
        return "directory"
    if stat.S_ISCHR(mode):
        return "tty" if os.major(status.st_rdev) in TTY_MAJORS else "device"
    if stat.S_ISBLK(mode):
        return "device"
    # eventfd and its kind read 'anon_inode:…', namespaces 'net:[…]'; '(unreachable)/…' is a file of another root.
    return "file" if target.startswith(("/", "(")) and not target.startswith(NOT_FILES) else "anon"


def is_deleted(pid: int, target: str, status: os.stat_result) -> bool:
    """The name under which a file was opened is gone, although other links to it may remain.

    The kernel appends ' (deleted)', which may also be the end of an ordinary name: then the name leads to the file.
    """
    if not target.endswith(DELETED):
        return status.st_nlink == 0 and target.startswith("/")
    named = stat_path(f"/proc/{pid}/root{target}")
    return named is None or (named.st_dev, named.st_ino) != (status.st_dev, status.st_ino)


def is_pty_slave(device: int) -> bool:
    """The device number is a /dev/pts/N."""
    return os.major(device) in PTY_SLAVES


def slave_number(device: int) -> int:
    """The N of /dev/pts/N: each of the eight majors has 256 of them."""
    return (os.major(device) - PTY_SLAVES.start) * 256 + os.minor(device)


def gpu_majors() -> frozenset[int]:
    """Major numbers of the NVIDIA character devices; all but 195 are given out when the module is loaded."""
    return parse_gpu_majors(read_text("/proc/devices") or "")


def parse_gpu_majors(devices: str) -> frozenset[int]:
    """The majors named nvidia* or gdrdrv among the character devices of /proc/devices, and 195."""
    characters = devices.partition("Block devices:")[0]
    pairs = (line.split() for line in characters.split("\n"))
    named = (int(pair[0]) for pair in pairs if len(pair) == 2 and pair[1].startswith(GPU_DRIVERS))
    return frozenset((NVIDIA_MAJOR, *named))


def gpu_files(pid: int) -> tuple[GpuMapping, ...]:
    """GPU device files that a process has open or mapped, by name or device number. Raises PermissionError."""
    return find_gpu_files(pid, descriptors_of(pid), maps_of(pid), gpu_majors())


def find_gpu_files(
    pid: int, descriptors: Iterable[OpenDescriptor], mappings: Iterable[Mapping], majors: frozenset[int]
) -> tuple[GpuMapping, ...]:
    """As gpu_files, from what was read already. A file mapped many times stands once, with its first range."""
    opened = [
        GpuMapping(f"fd {open_.fact.fd}", open_.fact.target)
        for open_ in descriptors
        if open_.fact.kind == "device" and _is_gpu(open_.fact.target, open_.fact.device, majors)
    ]
    mapped: dict[str, list[Mapping]] = {}
    for mapping in mappings:
        if mapping.path.startswith("/dev/") and mapping.path != DEV_ZERO:
            mapped.setdefault(mapping.path, []).append(mapping)
    found = (
        GpuMapping(_ranges(same), path, _managed_bytes(path, same))
        for path, same in mapped.items()
        if _is_gpu_mapping(pid, same[0], majors)
    )
    return (*opened, *found)


def _is_gpu_mapping(pid: int, mapping: Mapping, majors: frozenset[int]) -> bool:
    if mapping.path.startswith(GPU_NAMES):
        return True
    status = stat_path(f"/proc/{pid}/map_files/{mapping.range}")
    return status is not None and stat.S_ISCHR(status.st_mode) and os.major(status.st_rdev) in majors


def _managed_bytes(path: str, mappings: Iterable[Mapping]) -> int:
    if path != UVM:
        return 0
    return sum(mapping.end - mapping.start for mapping in mappings if mapping.start >= MANAGED_FROM)


def _is_gpu(path: str, device: int, majors: frozenset[int]) -> bool:
    return path.startswith(GPU_NAMES) or os.major(device) in majors


def _ranges(mappings: Sequence[Mapping]) -> str:
    first = mappings[0].range
    return first if len(mappings) == 1 else f"{first} and {len(mappings) - 1} more"


def uses_io_uring(pid: int) -> bool:
    """The process has an io_uring ring open or mapped: CRIU cannot dump it."""
    return has_io_uring(descriptors_of(pid), maps_of(pid))


def has_io_uring(descriptors: Iterable[OpenDescriptor], mappings: Iterable[Mapping]) -> bool:
    """As uses_io_uring, from what was read already."""
    return any(open_.fact.target == IO_URING for open_ in descriptors) or any(
        mapping.path == IO_URING for mapping in mappings
    )

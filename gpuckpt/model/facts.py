"""Facts about processes, files, GPUs and hosts, as they were seen at one moment.

Sizes are bytes, times are seconds since the epoch unless a name says otherwise, unknown is None.
Paths are text with surrogateescape. All of these can be written into a manifest as they are.
"""

from __future__ import annotations

from typing import Literal

from gpuckpt.model.records import dataclass

FdKind = Literal["file", "directory", "pipe", "fifo", "socket", "tty", "device", "memfd", "anon"]
CudaState = Literal["running", "locked", "checkpointed", "failed", "checkpointing", "restoring", "none", "unknown"]


@dataclass(frozen=True, slots=True, order=True)
class ProcessId:
    """A pid is an identity only together with its start time (clock ticks since boot, /proc/PID/stat field 22)."""

    pid: int
    start_ticks: int


@dataclass(frozen=True, slots=True)
class Descriptor:
    """One open file descriptor. `target` is /proc/PID/fd/N's link text."""

    fd: int
    kind: FdKind
    target: str
    flags: int = 0
    position: int = 0
    device: int = 0
    """st_dev for files; st_rdev for ttys and devices."""
    inode: int = 0
    deleted: bool = False


@dataclass(frozen=True, slots=True)
class GpuMapping:
    """A GPU device file that a process has open or mapped. `where` is 'fd 7' or the mapping's range."""

    where: str
    path: str
    managed_bytes: int = 0
    """Managed (UVM) memory in mappings of this file."""


@dataclass(frozen=True, slots=True)
class Process:
    """One process of a tree."""

    id: ProcessId
    ppid: int
    pgid: int
    sid: int
    comm: str
    argv: tuple[str, ...]
    """Secrets redacted unless the user asked to keep them."""
    exe: str
    cwd: str
    root: str
    uid: int
    gid: int
    state: str
    """The letter of /proc/PID/stat: R, S, D, T, t, Z …"""
    tracer_pid: int
    kernel_thread: bool
    threads: tuple[int, ...]
    rss_bytes: int
    shared_bytes: int
    swap_bytes: int
    namespaces: dict[str, str]
    """Kind (pid, net, mnt …) -> 'pid:[4026531836]'."""
    cgroup: str
    """The unified path, or the longest of the v1 paths."""
    descriptors: tuple[Descriptor, ...]
    environment_names: tuple[str, ...]
    gpu_files: tuple[GpuMapping, ...] = ()
    io_uring: bool = False
    seccomp: int = 0
    controlling_tty: int = 0
    foreground: bool = False
    """The process group is the foreground group of its terminal."""

    @property
    def pid(self) -> int:
        """The process id alone, for words."""
        return self.id.pid


@dataclass(frozen=True, slots=True)
class OpenFile:
    """A file of the file system that the tree has open or mapped, or that is exe, cwd or root."""

    path: str
    uses: tuple[str, ...]
    """'1234 fd 3', '1234 map', '1234 map exec', '1234 map shared-write', '1234 exe', '1234 cwd', '1234 root'."""
    size: int
    mode: int
    """st_mode, type bits included."""
    mtime: float
    device: int
    inode: int
    links: int
    blocks_bytes: int
    """Allocated bytes: what a deleted (ghost) file costs in the image."""
    deleted: bool = False
    flags: int | None = None
    position: int | None = None
    build_id: str | None = None
    uid: int = 0
    gid: int = 0
    resolved: str = ""
    """Where the path leads by links, if there are any on the way. What a process has open is named without them."""


@dataclass(frozen=True, slots=True)
class Socket:
    """A socket of the tree and the end it talks to."""

    inode: int
    family: str
    """'inet', 'inet6', 'unix', 'netlink', 'packet', 'vsock', or 'unknown'."""
    type: str
    """'stream', 'dgram', 'seqpacket', 'raw' or ''."""
    state: str
    """TCP: 'established', 'listen' …; unix: 'connected', 'listen', 'unconnected'."""
    local: str
    remote: str
    owners: tuple[str, ...]
    """'1234 fd 5' of the tree."""
    peer_inode: int = 0
    peer: str = ""
    """Who has the other end outside the tree ('812 dbus-daemon'), when known."""
    inside: bool = True
    """Both ends belong to the tree (or there is no other end)."""


@dataclass(frozen=True, slots=True)
class Pipe:
    """A pipe of the tree. `inside` is False when a process outside has one of its ends."""

    inode: int
    owners: tuple[str, ...]
    inside: bool
    peer: str = ""


@dataclass(frozen=True, slots=True)
class Stdio:
    """Descriptor 0-2 of the tree whose other end lies outside. `key` is CRIU's name for it ('pipe:[123]')."""

    fd: int
    kind: Literal["pipe", "socket", "tty"]
    key: str
    holders: tuple[str, ...]
    """Every '1234 fd 1' of the tree that shares this end."""
    writable: bool
    peer: str = ""


@dataclass(frozen=True, slots=True)
class GpuUse:
    """GPU memory of one process on one device."""

    pid: int
    gpu_uuid: str
    memory_bytes: int | None


@dataclass(frozen=True, slots=True)
class CudaProcess:
    """A process with a CUDA context: it has a restore thread and must be suspended."""

    id: ProcessId
    restore_tid: int
    state: CudaState


@dataclass(frozen=True, slots=True)
class Engine:
    """What the job is, found in its own mapped files and its command line."""

    name: str
    """'torch', 'vllm', 'sglang', 'jax' …"""
    version: str | None
    model: str | None = None
    weight_files: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Surroundings:
    """Who started and supervises the tree."""

    systemd_unit: str | None = None
    systemd_restart: str | None = None
    slurm_job_id: str | None = None
    slurm_step_id: str | None = None
    container_id: str | None = None
    container_runtime: str | None = None
    cgroup_memory_limit_bytes: int | None = None
    session_leader_inside: bool = True
    has_terminal: bool = False


@dataclass(frozen=True, slots=True)
class Tree:
    """A whole process tree at one moment; the root comes first, parents before children."""

    root: ProcessId
    processes: tuple[Process, ...]
    files: tuple[OpenFile, ...]
    sockets: tuple[Socket, ...]
    pipes: tuple[Pipe, ...]
    outside_stdio: tuple[Stdio, ...]
    surroundings: Surroundings
    cuda: tuple[CudaProcess, ...] = ()
    gpu_uses: tuple[GpuUse, ...] = ()
    engines: tuple[Engine, ...] = ()
    file_locks: bool = False

    @property
    def pids(self) -> tuple[int, ...]:
        """All pids of the tree, root first."""
        return tuple(process.pid for process in self.processes)

    @property
    def ids(self) -> tuple[ProcessId, ...]:
        """All identities of the tree, root first."""
        return tuple(process.id for process in self.processes)

    @property
    def stopped(self) -> tuple[ProcessId, ...]:
        """Processes found stopped by a signal: they stay stopped after a restore."""
        return tuple(process.id for process in self.processes if process.state == "T")


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU as NVML shows it."""

    index: int
    uuid: str
    name: str
    memory_total_bytes: int | None
    memory_free_bytes: int | None
    pci_bus_id: str = ""
    minor: int | None = None
    mig_enabled: bool | None = None
    persistence_mode: bool | None = None
    compute_pids: tuple[int, ...] = ()
    problem: str = ""
    """Why this GPU could not be read, in words; empty when it could."""


@dataclass(frozen=True, slots=True)
class GpuDriver:
    """The GPU driver and what it offers for checkpoints."""

    version: str | None = None
    cuda_version: str | None = None
    """'13.0': the highest CUDA the driver speaks."""
    interface: Literal["none", "api", "program"] = "none"
    """'api': cuCheckpointProcess* in libcuda (driver >= 570); 'program': cuda-checkpoint --action (555-569)."""
    program: str | None = None
    gpus: tuple[Gpu, ...] = ()
    mps: bool = False
    problem: str = ""


@dataclass(frozen=True, slots=True)
class CriuProgram:
    """The CRIU found on a host."""

    path: str | None = None
    version: str | None = None
    """'4.2.1'."""
    check_ok: bool | None = None
    check_output: str = ""
    network_lock: Literal["nftables", "iptables", "skip"] = "skip"
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Cpu:
    """The CPU as far as a restored program can tell it apart."""

    model: str
    vendor: str
    flags: tuple[str, ...]
    cores: int


@dataclass(frozen=True, slots=True)
class Host:
    """What one host is and can do."""

    hostname: str
    kernel: str
    machine: str
    """'x86_64' …"""
    os: str
    glibc: str | None
    cpu: Cpu
    memory_total_bytes: int
    memory_available_bytes: int
    privileged: bool
    missing_capabilities: tuple[str, ...]
    criu: CriuProgram
    gpu: GpuDriver
    cgroup: Literal["systemd", "v2", "none"]
    python: str
    gpuckpt: str
    uptime_seconds: float = 0.0
    transparent_huge_pages: str | None = None
    image_space_bytes: int | None = None

"""The facts that checks judge, and what somebody who gathers them must look at.

Unknown is None. A description of a process in words is '1234 python'.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from pathlib import PurePosixPath
from typing import Literal, Protocol

from gpuckpt.model.facts import Host, OpenFile, Socket, Tree
from gpuckpt.model.manifest import Manifest
from gpuckpt.model.records import dataclass
from gpuckpt.model.requests import DumpRequest, RestoreRequest


class HasHost(Protocol):
    """Facts that hold a host: dump's and restore's alike."""

    @property
    def host(self) -> Host:
        """The host that is judged."""
        ...


class UsesGpu(HasHost, Protocol):
    """Facts about a host whose GPUs matter, or not."""

    @property
    def uses_cuda(self) -> bool:
        """There are processes that must be suspended or resumed on a GPU (or may be, on a host with one)."""
        ...


class HasGpuJob(UsesGpu, Protocol):
    """Facts about a host and a job that may use GPUs."""

    @property
    def tree(self) -> Tree:
        """The job's processes."""
        ...


class CopiesGpu(UsesGpu, Protocol):
    """Facts about GPU memory that will be copied."""

    @property
    def huge_pages(self) -> bool:
        """--huge-pages is asked for."""
        ...


class HasLeftovers(Protocol):
    """Facts about what interrupted runs left."""

    @property
    def leftovers(self) -> tuple[str, ...]:
        """Each in words."""
        ...


NOT_CONNECTED = frozenset({"listen", "closed", "unconnected", "unknown", ""})
"""States of a TCP socket that has no other end."""


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """One limit on the memory that the job's processes may take."""

    name: str
    """'cgroup /system.slice/job.service', 'RLIMIT_AS of 1234 python'."""
    free_bytes: int
    pid: int | None = None
    """The only process it binds; None: it binds the whole tree."""


@dataclass(frozen=True, slots=True)
class HostFacts:
    """A host alone: what it can be judged by without a job."""

    host: Host
    leftovers: tuple[str, ...] = ()
    """What an interrupted run has left changed here, in words."""

    @property
    def huge_pages(self) -> bool:
        """Nothing is asked for yet."""
        return False

    @property
    def uses_cuda(self) -> bool:
        """A host with an NVIDIA driver is meant for GPU jobs."""
        return bool(self.host.gpu.version or self.host.gpu.gpus)


@dataclass(frozen=True, slots=True)
class DumpFacts:
    """All that a dump is judged by."""

    request: DumpRequest
    tree: Tree
    host: Host
    own_pid: int
    own_uid: int
    ancestors_of_gpuckpt: frozenset[int]
    """Parents of the gpuckpt process up to init."""
    own_namespaces: Mapping[str, str]
    """As Process.namespaces, of the gpuckpt process."""
    image_exists: bool
    """Something, a dangling link included, stands at the image path."""
    image_parent_ok: bool
    """The directory that will hold the image exists and is a directory."""
    image_parent_mode: int
    """Its st_mode; 0 where it does not exist."""
    image_parent_owner: int
    """Its uid."""
    image_space_bytes: int | None
    """Free bytes where the image will lie, quota included."""
    image_in_memory: bool = False
    """It will lie in this host's memory (tmpfs)."""
    base_bytes: int | None = None
    """Memory of the base image that can be shared, not written; None: no base, or nothing of it can be shared."""
    unsafe_ancestors: tuple[str, ...] = ()
    """Who else could exchange a directory or link on the way to the image: '/srv/x belongs to user 1000'."""
    lacks_resource_capability: bool = False
    """gpuckpt has no CAP_SYS_RESOURCE."""
    tracers: Mapping[int, str] = field(default_factory=dict)
    """Tracer's pid -> '1234 gdb'."""
    memory_limits: tuple[MemoryLimit, ...] = ()
    """Of every ancestor cgroup, and RLIMIT_AS of the CUDA processes."""
    proc_watches: tuple[str, ...] | None = None
    """inotify watches on /proc or /sys: '1234 fd 5 watches /proc/self/status'."""
    special_mappings: tuple[str, ...] = ()
    """Mappings of kernel objects without a file: '1234 /secretmem (deleted)', '1234 anon_inode:[perf_event]'."""
    nccl_environment: Mapping[int, Mapping[str, str]] | None = None
    """CUDA process -> its NCCL_* variables with values; a pid that is missing could not be read."""

    not_captured: Mapping[str, str] = field(default_factory=dict)
    """Files that should have been saved into the image and could not: path -> why."""

    @property
    def huge_pages(self) -> bool:
        """As the request."""
        return self.request.huge_pages

    @property
    def uses_cuda(self) -> bool:
        """A process of the tree has a CUDA context."""
        return bool(self.tree.cuda)


CapturedHere = Literal["same", "grown", "other"]
"""Byte for byte; longer, with the image's bytes at its start; anything else."""


@dataclass(frozen=True, slots=True)
class RestoreFacts:
    """All that a restore is judged by; `host` is the host it would happen on."""

    request: RestoreRequest
    manifest: Manifest
    host: Host
    own_uid: int
    files_here: Mapping[str, OpenFile | None]
    """Every path of needed_paths(): what lies there now, None where nothing does. Others were not looked at."""
    ids_in_use: Mapping[int, str]
    """Numbers of needed_ids() that are taken as pid, thread, group or session -> by whom."""
    ports_in_use: Mapping[str, str]
    """'tcp 0.0.0.0:8000' of needed_ports() that are taken -> by whom."""
    missing_addresses: tuple[str, ...]
    """Addresses of needed_addresses() that this host does not have."""
    free_memory_bytes: int | None
    """The smallest of the host's available memory and the limits of the cgroup the tree will live in."""
    image_mode: int | None = None
    """st_mode of the image directory; None when it is still on its way (migrate)."""
    image_owner: int | None = None
    unsafe_ancestors: tuple[str, ...] = ()
    """As DumpFacts.unsafe_ancestors."""
    gpu_holders: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """GPU UUID -> who has memory there: '812 python, 12.0 GiB'."""
    lsm: str | None = None
    """The security modules of this host, in the form of CriuOptions.lsm."""
    captured_here: Mapping[str, CapturedHere] = field(default_factory=dict)
    """Captured files that lie here -> how they compare with the image's; those that could not be read are missing."""
    leftovers: tuple[str, ...] = ()
    """What an interrupted run left here that can disturb this one, in words."""
    contents: Mapping[str, bool] | None = None
    """Files that are here, and were compared with those of the host the job leaves: whether they are the same."""
    network_exists: bool = True
    """The network namespace that was named is here."""
    unix_names_in_use: Mapping[str, str] = field(default_factory=dict)
    """Names of needed_unix_names() that are taken where the tree would bind them -> by whom."""
    writers: Mapping[str, str] = field(default_factory=dict)
    """Files that the restore would move aside and that a process here has open for writing -> by whom."""

    @property
    def tree(self) -> Tree:
        """The tree of the image."""
        return self.manifest.tree

    @property
    def huge_pages(self) -> bool:
        """As the request."""
        return self.request.huge_pages

    @property
    def uses_cuda(self) -> bool:
        """The image holds suspended CUDA processes."""
        return bool(self.manifest.cuda)

    @property
    def tcp(self) -> str:
        """The policy for connections that leave the tree: the request's, else the dump's."""
        return self.request.tcp or self.manifest.tcp


def needed_ids(manifest: Manifest) -> frozenset[int]:
    """Every number the restored tree takes: pids and thread ids, and the groups and sessions its members lead.

    A group or session whose leader is outside the tree is joined or replaced, not taken.
    """
    found: set[int] = set()
    for process in manifest.tree.processes:
        found |= {process.pid, *process.threads}
    # A session or group can outlive its leader: then no process of the tree has the number, yet the tree needs it.
    root = manifest.tree.processes[0] if manifest.tree.processes else None
    outside = {root.pgid, root.sid} if root is not None else set()
    for process in manifest.tree.processes:
        found |= {process.pgid, process.sid} - outside
    return frozenset(found)


SHARED_MEMORY = "/dev/shm/"  # noqa: S108 - where shm_open(3) makes its files


def has_own_place(facts: RestoreFacts, path: str) -> bool:
    """A clone's shared memory is its own: what lies here under that name is somebody else's."""
    return facts.request.clone and path.startswith(SHARED_MEMORY)


def needed_unix_names(manifest: Manifest) -> frozenset[str]:
    """Paths and abstract names ('@name') that unix sockets of the tree are bound to."""
    return frozenset(one.local for one in manifest.tree.sockets if one.family == "unix" and one.local)


def needed_paths(manifest: Manifest) -> tuple[str, ...]:
    """Every path that must be looked at here before a restore."""
    paths = [file.path for file in manifest.tree.files if not file.deleted]
    paths += [captured.path for captured in manifest.captured]
    paths += [str(PurePosixPath(captured.path).parent) for captured in manifest.captured]
    return tuple(dict.fromkeys(paths))


def is_inet(socket: Socket) -> bool:
    """An internet socket."""
    return socket.family in ("inet", "inet6")


def is_connection(socket: Socket) -> bool:
    """A TCP connection, in whatever state it is."""
    return is_inet(socket) and socket.type == "stream" and socket.state not in NOT_CONNECTED


def outside_connections(tree: Tree) -> tuple[Socket, ...]:
    """TCP connections whose other end is not in the tree."""
    return tuple(socket for socket in tree.sockets if is_connection(socket) and not socket.inside)


def needed_sockets(manifest: Manifest, tcp: str) -> tuple[Socket, ...]:
    """Internet sockets that come back with their address: all but the outside connections that are closed."""
    closed = set(outside_connections(manifest.tree)) if tcp == "close" else set()
    return tuple(s for s in manifest.tree.sockets if is_inet(s) and s.local and s not in closed)


def needed_ports(manifest: Manifest, tcp: str, moved: Mapping[int, int] | None = None) -> tuple[str, ...]:
    """'tcp 0.0.0.0:8000', 'udp [::1]:53': what the restored tree binds; `moved` as --port has it."""
    names = {"stream": "tcp", "dgram": "udp"}
    found = (
        f"{names[socket.type]} {_moved(socket.local, moved or {})}"
        for socket in needed_sockets(manifest, tcp)
        if socket.type in names and port_of(socket.local)
    )
    return tuple(dict.fromkeys(found))


def _moved(endpoint: str, moved: Mapping[int, int]) -> str:
    port = port_of(endpoint)
    return f"{endpoint.rpartition(':')[0]}:{moved.get(port, port)}"


def needed_addresses(manifest: Manifest, tcp: str) -> tuple[str, ...]:
    """The local addresses the restored tree binds, without '0.0.0.0' and '::'."""
    found = (address_of(socket.local) for socket in needed_sockets(manifest, tcp))
    return tuple(dict.fromkeys(address for address in found if address not in ("", "0.0.0.0", "::", "*")))  # noqa: S104


def address_of(endpoint: str) -> str:
    """'10.0.0.1' of '10.0.0.1:80', '::1' of '[::1]:80'."""
    return endpoint.rpartition(":")[0].strip("[]")


def port_of(endpoint: str) -> int:
    """80 of '10.0.0.1:80'; 0 where there is none."""
    port = endpoint.rpartition(":")[2]
    return int(port) if port.isdigit() else 0

"""Facts for the checks: of a tree before a dump, of a host before a restore. Nothing is touched here."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from dataclasses import field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from gpuckpt import __version__
from gpuckpt.accelerators.cuda_probe import Asking, ProbeFailed, cuda_processes
from gpuckpt.checks import (
    DumpFacts,
    MemoryLimit,
    RestoreFacts,
    file_acts,
    needed_addresses,
    needed_ids,
    needed_paths,
    needed_ports,
    needed_unix_names,
)
from gpuckpt.flows import unsealing
from gpuckpt.model.errors import DumpFailed, GpuckptError, MachineLacks, NotFound, Refused
from gpuckpt.model.facts import GpuUse, Host, Process, ProcessId, Tree
from gpuckpt.model.manifest import Lineage
from gpuckpt.model.records import dataclass
from gpuckpt.owner.runs import RUNTIME, make_runtime
from gpuckpt.stores import directory
from gpuckpt.system import commands, namespaces, procfs
from gpuckpt.system.asking import meanwhile
from gpuckpt.system.files import is_in_memory, unsafe_places

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from gpuckpt.accelerators.protocol import Look
    from gpuckpt.checks.facts import CapturedHere
    from gpuckpt.flows.machine import Machine
    from gpuckpt.model.facts import CudaProcess, GpuDriver
    from gpuckpt.model.manifest import Manifest
    from gpuckpt.model.requests import DumpRequest, RestoreRequest

LINEAGE = RUNTIME / "lineage"
AT_REST = ("t", "T")
"""States of processes that CRIU holds."""

SYSTEMCTL_SECONDS = 10.0
REAP_SECONDS = 3.0
"""What a dump has just ended may still wait for a slow init, that of a container say: up to 2 s were seen."""


def host(machine: Machine, image_place: Path | None = None, gpu: Callable[[], GpuDriver] | None = None) -> Host:
    """What this host is and can do; `gpu`: somebody is being asked about the GPUs already."""
    # Both are programs that are waited for.
    with meanwhile(machine.examine_criu) as criu, meanwhile(gpu or machine.gpu_driver) as driver:
        pieces = procfs.read_host_pieces()
        return Host(
            **{name: getattr(pieces, name) for name in pieces.__slots__},
            criu=criu(),
            gpu=driver(),
            gpuckpt=__version__,
            image_space_bytes=free_bytes(image_place) if image_place else None,
        )


def free_bytes(place: Path) -> int | None:
    """Bytes that this user may still write below a directory, or below its nearest parent that exists."""
    while not os.path.exists(place) and place != place.parent:  # noqa: PTH110 - may be unreadable to this user
        place = place.parent
    try:
        seen = os.statvfs(place)
    except OSError:
        return None
    return seen.f_bavail * seen.f_frsize


def identify(pid: int) -> ProcessId:
    """The process a user's pid means. Raises NotFound or Refused with what the number is instead."""
    kind = procfs.describe_pid(pid)
    identity = procfs.process_id(pid)
    if kind.kind == "none" or identity is None:
        raise NotFound(f"there is no process {pid}", "name a running process (`ps -e` lists them)")
    if kind.kind == "thread":
        raise NotFound(f"{pid} is a thread of process {kind.tgid} ({kind.comm})", f"say --tree {kind.tgid}")
    if pid == 1:
        raise Refused(f"process 1 ({kind.comm}) is init", "name a process of your own")
    if kind.kind == "kernel":
        raise Refused(f"{pid} ({kind.comm}) is a kernel thread", "name a process of your own")
    if kind.kind == "zombie":
        raise NotFound(
            f"process {pid} ({kind.comm}) has ended and waits for {kind.parent} to reap it", "nothing to save"
        )
    return identity


def tree(
    pid: int,
    machine: Machine,
    *,
    keep_argv: bool,
    force_program: bool = False,
    look: Callable[[], Look] | None = None,
) -> Tree:
    """The whole tree of `pid`, CUDA and GPU memory included; `look`: the driver is being asked about the GPUs already.

    Raises NotFound, Refused, or MachineLacks when the GPU driver does not answer about its processes.
    """
    root = identify(pid)
    if machine.accelerator() is None:
        return _with_supervisor(procfs.read_tree(root, keep_argv=keep_argv))
    with (
        meanwhile(look or machine.look) as looked,
        contextlib.closing(Asking(force_program=force_program)) as probe,
    ):
        seen = _with_supervisor(procfs.read_tree(root, keep_argv=keep_argv))
        cuda = cuda_of(seen.ids, probe=probe)
        pids = {one.id.pid for one in cuda}
        return replace(seen, cuda=cuda, gpu_uses=tuple(use for use in looked().uses if use.pid in pids) if cuda else ())


def _with_supervisor(seen: Tree) -> Tree:
    """The tree with its unit's Restart= setting: a supervisor that restarts would start a second copy."""
    unit = seen.surroundings.systemd_unit
    program = commands.find_program("systemctl") if unit else None
    if unit is None or program is None:
        return seen
    answer = commands.run([str(program), "show", "--property=Restart", "--value", unit], timeout=SYSTEMCTL_SECONDS)
    restart = answer.stdout.strip() if answer.ok else ""
    return replace(seen, surroundings=replace(seen.surroundings, systemd_restart=restart or None))


def tree_at_rest(before: Tree, *, keep_argv: bool) -> Tree:
    """The tree again, read while it stands still: sizes, positions and descriptors are those of the image.

    What only a running tree shows (states, CUDA, GPU memory, engines) stays as it was seen before. Raises
    DumpFailed where it did not stand still to the end: what was read of a process that goes on, or ends, is not what
    the image holds.
    """
    now = procfs.read_tree(before.root, keep_argv=keep_argv)
    moved = [one.pid for one in now.processes if procfs.state(one.id) not in AT_REST and one.state != "Z"]
    if moved:
        raise DumpFailed(
            f"process {moved[0]} did not stand still while the image was made: CRIU was killed, or let it go",
            "repeat the command once the tree runs",
        )
    seen = {process.id: process for process in before.processes}
    processes = tuple(_as_before_the_stop(process, seen.get(process.id)) for process in now.processes)
    around = replace(now.surroundings, systemd_restart=before.surroundings.systemd_restart)
    return replace(
        now,
        surroundings=around,
        processes=processes,
        cuda=before.cuda,
        gpu_uses=before.gpu_uses,
        engines=before.engines,
    )


def _as_before_the_stop(process: Process, before: Process | None) -> Process:
    """A process without the marks of the capture: CRIU traces it and it stands still; GPU files are let go."""
    if before is None:  # born after the facts were gathered
        state = "S" if process.state == "t" else process.state
        return replace(process, state=state, tracer_pid=0)
    return replace(
        process,
        state=before.state,
        tracer_pid=before.tracer_pid,
        gpu_files=before.gpu_files,
        foreground=before.foreground,
    )


def cuda_of(
    ids: Sequence[ProcessId], *, force_program: bool = False, probe: Asking | None = None
) -> tuple[CudaProcess, ...]:
    """The CUDA processes among these. Raises MachineLacks when the driver does not answer."""
    try:
        return cuda_processes(ids, force_program=force_program) if probe is None else probe.about(ids)
    except ProbeFailed as error:
        raise MachineLacks(str(error), "`gpuckpt inspect` says what this host's GPU driver can do") from None


def dump_facts(request: DumpRequest, machine: Machine) -> DumpFacts:
    """All that a dump is judged by."""
    parent = request.image.parent
    with meanwhile(machine.look) as look, meanwhile(lambda: host(machine, parent, lambda: look().driver)) as asked:
        seen = tree(request.pid, machine, keep_argv=request.keep_argv, force_program=request.force_program, look=look)
        here = asked()
    parent_seen = parent.stat() if os.path.isdir(parent) else None  # noqa: PTH112 - may be unreadable to this user
    return DumpFacts(
        request=request,
        tree=seen,
        host=here,
        own_pid=os.getpid(),
        own_uid=os.geteuid(),
        ancestors_of_gpuckpt=frozenset(pid for pid, _ in procfs.ancestors(os.getpid())),
        own_namespaces=procfs.namespaces_of(os.getpid()),
        image_exists=os.path.lexists(request.image),
        image_parent_ok=parent_seen is not None,
        image_parent_mode=parent_seen.st_mode if parent_seen else 0,
        image_parent_owner=parent_seen.st_uid if parent_seen else 0,
        image_space_bytes=free_bytes(parent),
        image_in_memory=is_in_memory(parent),
        base_bytes=_shareable_bytes(request),
        unsafe_ancestors=unsafe_places(parent, os.geteuid()),
        lacks_resource_capability=procfs.lacks_resource_capability(),
        tracers={one.tracer_pid: _tracer(one.pid) for one in seen.processes if one.tracer_pid},
        memory_limits=_memory_limits(seen),
        proc_watches=procfs.kernel_watches(seen.pids),
        special_mappings=procfs.special_mappings(seen.pids),
        nccl_environment={one.id.pid: procfs.environment_values(one.id.pid, "NCCL_") for one in seen.cuda},
    )


def _shareable_bytes(request: DumpRequest) -> int | None:
    """How much memory the base holds, where its packs can be linked into the image. Only looked at."""
    if request.base is None or request.plain:
        return None
    try:
        if request.base.stat().st_dev != request.image.parent.stat().st_dev:
            return None  # its packs would be copied
        base = directory.open_image(request.base)
    except (OSError, GpuckptError):
        return None  # the dump says why when it opens the base itself
    base.close()
    why_not = unsealing.why_not_shared(base.manifest, request.identity, encrypted=bool(request.encrypt_to))
    return None if why_not else base.manifest.bytes_raw


def _tracer(pid: int) -> str:
    return procfs.describe_pid(pid).tracer


def _memory_limits(seen: Tree) -> tuple[MemoryLimit, ...]:
    """The room for the GPU's copy, which is charged to the process: every ancestor cgroup, and RLIMIT_AS."""
    found = {limit.name: limit for one in seen.cuda for limit in _cgroup_rooms(one.id.pid)}
    own = [
        MemoryLimit(f"RLIMIT_AS of {procfs.words_for(one.id.pid)}", room, one.id.pid)
        for one in seen.cuda
        if (room := procfs.address_space_room(one.id.pid)) is not None
    ]
    return (*found.values(), *own)


def _cgroup_rooms(pid: int) -> list[MemoryLimit]:
    return [
        MemoryLimit(f"cgroup {limit.directory}", max(0, limit.limit_bytes - (limit.used_bytes or 0)))
        for limit in procfs.memory_limits(pid)
    ]


def free_memory_bytes() -> int:
    """What this process can still take: of the host, and within its cgroups."""
    return min([procfs.memory()[1], *(room.free_bytes for room in _cgroup_rooms(os.getpid()))])


def restore_facts(
    request: RestoreRequest,
    manifest: Manifest,
    machine: Machine,
    captured_here: Mapping[str, CapturedHere],
    *,
    reap_seconds: float = REAP_SECONDS,
) -> RestoreFacts:
    """All that a restore of this manifest is judged by; zombies that have its pids get `reap_seconds` to go."""
    here = host(machine)
    tcp = request.tcp or manifest.tcp
    image = request.image.stat() if request.image.exists() else None  # a migration's is still on its way
    network = _network(request, manifest, tcp)
    # With --wait the tree stays in our cgroup; else it gets one of its own, without a limit.
    rooms = [room.free_bytes for room in _cgroup_rooms(os.getpid())] if request.wait else []
    facts = RestoreFacts(
        request=request,
        manifest=manifest,
        host=here,
        own_uid=os.geteuid(),
        files_here={path: procfs.file_here(path) for path in needed_paths(manifest)},
        ids_in_use={} if request.own_pids else procfs.who_uses_ids(needed_ids(manifest), reap_seconds),
        ports_in_use=network.ports,
        missing_addresses=network.missing,
        free_memory_bytes=min([here.memory_available_bytes, *rooms]),
        image_mode=image.st_mode if image else None,
        image_owner=image.st_uid if image else None,
        unsafe_ancestors=unsafe_places(request.image, os.geteuid()),
        gpu_holders=_gpu_holders(here) if manifest.cuda else {},
        lsm=procfs.security_modules(),
        captured_here=captured_here,
        network_exists=network.exists,
        unix_names_in_use=network.unix_names,
    )
    replaced = [act.file.path for act in file_acts(facts) if act.kind == "replace"]
    return replace(facts, writers=procfs.writers_of(replaced)) if replaced else facts


@dataclass(frozen=True, slots=True)
class _Network:
    """What the tree would find in the network it comes up in."""

    ports: Mapping[str, str] = field(default_factory=dict)
    missing: tuple[str, ...] = ()
    unix_names: Mapping[str, str] = field(default_factory=dict)
    exists: bool = True


LOOPBACK = ("127.", "::1", "::ffff:127.")


def _network(request: RestoreRequest, manifest: Manifest, tcp: str) -> _Network:
    ports = needed_ports(manifest, tcp, request.ports)
    addresses, names = needed_addresses(manifest, tcp), needed_unix_names(manifest)
    # Paths are the host's wherever the network is; abstract names are the network's.
    paths = procfs.unix_names_in_use({name for name in names if not name.startswith("@")})
    abstract = {name for name in names if name.startswith("@")}

    def look() -> _Network:
        taken = {**paths, **procfs.unix_names_in_use(abstract)}
        return _Network(procfs.ports_in_use(ports), procfs.missing_addresses(addresses), taken)

    if not request.own_network:
        return look()
    name = request.named_network
    if name is None:
        missing = tuple(address for address in addresses if not address.startswith(LOOPBACK))
        return _Network(missing=missing, unix_names=paths)
    try:
        return namespaces.in_network(namespaces.network(name), look)
    except OSError:
        return _Network(exists=False, unix_names=paths)


def _gpu_holders(here: Host) -> dict[str, tuple[str, ...]]:
    return {gpu.uuid: tuple(procfs.words_for(pid) for pid in gpu.compute_pids) for gpu in here.gpu.gpus}


def memory_by_process(uses: Sequence[GpuUse], pid: int) -> dict[str, int]:
    """GPU UUID -> bytes of one process, where known."""
    return {use.gpu_uuid: use.memory_bytes for use in uses if use.pid == pid and use.memory_bytes}


def lineage_of(root: ProcessId) -> Lineage:
    """Where a tree comes from: noted when gpuckpt restored it, lost with /run at a reboot, as the tree is."""
    try:
        said = json.loads(_lineage_file(root).read_text())
        return Lineage(parent_image_id=str(said["image_id"]), generation=int(said["generation"]) + 1)
    except (OSError, ValueError, KeyError, TypeError):
        return Lineage()


def note_lineage(root: ProcessId, manifest: Manifest) -> None:
    """Note that this tree was restored from this image, and forget trees that have ended."""
    make_runtime(LINEAGE.name)
    for old in LINEAGE.iterdir():
        pid, _, ticks = old.name.partition("-")
        if not (pid.isdigit() and ticks.isdigit() and procfs.is_same(ProcessId(int(pid), int(ticks)))):
            old.unlink(missing_ok=True)
    said = {"image_id": manifest.image_id, "generation": manifest.lineage.generation}
    _lineage_file(root).write_text(json.dumps(said))


def _lineage_file(root: ProcessId) -> Path:
    return LINEAGE / f"{root.pid}-{root.start_ticks}"

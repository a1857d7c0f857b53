"""Checks of the GPU side of a dump, and of what the driver must offer to dump and restore."""

from __future__ import annotations

from collections.abc import Mapping

from gpuckpt.checks.check import Check, Judgement, failed, listing, none_of, passed, size, unknown, version
from gpuckpt.checks.facts import CopiesGpu, DumpFacts, HasGpuJob, MemoryLimit, UsesGpu
from gpuckpt.checks.processes import named
from gpuckpt.model.facts import Gpu, GpuDriver, Tree

OLDEST_DRIVER = 555
"""550 has only `cuda-checkpoint --toggle`: no lock of its own, so no safe way back."""
DRIVER_HINT = "install NVIDIA driver 570 or newer (555-569 work with the program cuda-checkpoint beside them)"

KNOWN_BUGS = {
    "595.71": "ending a restored GPU process can freeze the whole host (NVIDIA/cuda-checkpoint issue 53)",
    "610.57": "locking a busy process can end it by SIGSEGV (NVIDIA/cuda-checkpoint issue 58)",
}
NO_MANAGED_UP_TO = 610
"""None of the drivers so far can suspend managed memory; a later one is asked."""
FEATURES = ((570, "PyTorch and whatever else loads NVML, and trees of several CUDA processes"),)
ARM_DRIVER = 595

COPY_SPARE_BYTES = 256 << 20
"""What the driver takes beside the copy itself."""


def major(driver: GpuDriver) -> int:
    """570 of '570.86.15'; 0 when unknown."""
    return (version(driver.version) or (0,))[0]


def gpu_bytes(tree: Tree) -> int | None:
    """GPU memory of the tree; None when that of one process is unknown."""
    if any(use.memory_bytes is None for use in tree.gpu_uses):
        return None
    if tree.cuda and not tree.gpu_uses:
        # NVML lists none of them: it counts pids of another namespace, or could not be read. Where it lists some, the
        # others (torchrun's agent) have a CUDA context without memory.
        return None
    return sum(use.memory_bytes or 0 for use in tree.gpu_uses)


def used_gpus(tree: Tree, driver: GpuDriver) -> tuple[Gpu, ...]:
    """The GPUs the tree has memory on; all of the host's when that is unknown."""
    uuids = {use.gpu_uuid for use in tree.gpu_uses}
    return tuple(gpu for gpu in driver.gpus if gpu.uuid in uuids) or driver.gpus


def gpu_name(gpu: Gpu) -> str:
    """'GPU 0 (NVIDIA H200, GPU-9a…)'."""
    return f"GPU {gpu.index} ({gpu.name or 'unknown model'}, {gpu.uuid})"


def _driver(facts: UsesGpu) -> Judgement | None:
    if not facts.uses_cuda:
        return None
    driver = facts.host.gpu
    expected = f"NVIDIA driver {OLDEST_DRIVER} or newer, with an interface for checkpoints"
    if driver.interface == "none" or major(driver) < OLDEST_DRIVER:
        what = f"driver {driver.version}" if driver.version else "no driver"
        return failed(expected, f"{what}: {driver.problem}" if driver.problem else what, DRIVER_HINT)
    found = f"driver {driver.version}, CUDA {driver.cuda_version or '?'}"
    return unknown(expected, f"{found}: {driver.problem}", DRIVER_HINT) if driver.problem else passed(expected, found)


def _driver_features(facts: DumpFacts) -> Judgement | None:
    driver = facts.host.gpu
    if not facts.uses_cuda or major(driver) < OLDEST_DRIVER:
        return None
    expected = "a driver that can suspend all that the job uses"
    if facts.host.machine == "aarch64" and major(driver) < ARM_DRIVER:
        hint = f"install driver {ARM_DRIVER} or newer; older ones answer 'not supported' on ARM"
        return failed(expected, f"driver {driver.version} on ARM", hint)
    engines = {engine.name for engine in facts.tree.engines}
    first, what = FEATURES[0]
    if major(driver) < first and (engines or len(facts.tree.cuda) > 1):
        return failed(expected, f"driver {driver.version}", f"install driver {first} or newer: it brought {what}")
    return passed(expected, f"driver {driver.version}")


def _driver_bugs(facts: UsesGpu) -> Judgement | None:
    running = facts.host.gpu.version or ""
    if not facts.uses_cuda or not running:
        return None
    bugs = [f"driver {running}: {text}" for bad, text in KNOWN_BUGS.items() if version(running)[:2] == version(bad)]
    return none_of(bugs, expected="a driver without known bugs in checkpoints", hint="install a newer driver")


def _readable(facts: DumpFacts) -> Judgement | None:
    if not facts.uses_cuda:
        return None
    lost = [f"{gpu_name(gpu)}: {gpu.problem}" for gpu in used_gpus(facts.tree, facts.host.gpu) if gpu.problem]
    hint = "look for an Xid in `dmesg` (79: the GPU is lost; reset it or reboot) and at `nvidia-smi`"
    return none_of(lost, expected="GPUs that answer", hint=hint, fine="they do")


def mig_judgement(gpus: tuple[Gpu, ...], slices: tuple[str, ...] = ()) -> Judgement:
    """Whether GPUs are free of MIG, which the driver's checkpoint cannot do and reports as 'out of memory'."""
    expected = "no MIG: the driver's checkpoint does not support it"
    hint = "move the job to a GPU without MIG (on an idle GPU: nvidia-smi -i N -mig 0)"
    on = [f"{gpu_name(gpu)} is in MIG mode" for gpu in gpus if gpu.mig_enabled]
    on += [f"the job uses {uuid}" for uuid in slices]
    unread = [gpu_name(gpu) for gpu in gpus if gpu.mig_enabled is None]
    if not on and (unread or not gpus):
        return unknown(expected, f"MIG mode is not known: {listing(unread) or 'no GPU could be read'}", hint)
    return none_of(on, expected=expected, hint=hint)


def _mig(facts: DumpFacts) -> Judgement | None:
    if not facts.uses_cuda:
        return None
    slices = tuple(sorted({use.gpu_uuid for use in facts.tree.gpu_uses if use.gpu_uuid.startswith("MIG-")}))
    return mig_judgement(used_gpus(facts.tree, facts.host.gpu), slices)


def _mps(facts: HasGpuJob) -> Judgement | None:
    if not facts.uses_cuda:
        return None
    expected = "no MPS: the driver's checkpoint does not support it"
    hint = (
        "end the daemon (echo quit | nvidia-cuda-mps-control) when its clients are done, and start the job without it"
    )
    return failed(expected, "MPS runs on this host", hint) if facts.host.gpu.mps else passed(expected, "none")


def _gpu_files(facts: DumpFacts) -> Judgement | None:
    if not any(process.gpu_files for process in facts.tree.processes):
        return None
    cuda = {process.id for process in facts.tree.cuda}
    found = [
        f"{named(process)}, {file.where}: {file.path}"
        for process in facts.tree.processes
        if process.id not in cuda
        for file in process.gpu_files
    ]
    hint = (
        "such a process was forked after CUDA or NVML began and cannot be suspended: start the job's children by "
        "'spawn' or 'forkserver' (PyTorch: DataLoader(multiprocessing_context='spawn')), or end them before the dump"
    )
    return none_of(found, expected="GPU files only in processes with a CUDA context", hint=hint, fine="so it is")


def _state(facts: DumpFacts) -> Judgement | None:
    if not facts.uses_cuda:
        return None
    expected = "every CUDA process in state running"
    hint = (
        f"an interrupted run left it so: `gpuckpt restore --tree {facts.tree.root.pid}` brings it back; "
        "state failed: only ending the process helps"
    )
    stopped = set(facts.tree.stopped)
    if any(process.id in stopped for process in facts.tree.cuda):
        # The driver's own thread is stopped as well: a lock would wait for ever, whatever its limit.
        found = listing(f"{process.id.pid}: stopped" for process in facts.tree.cuda if process.id in stopped)
        pids = " ".join(str(process.id.pid) for process in facts.tree.cuda if process.id in stopped)
        return failed(
            expected, found, f"let it run (kill -CONT {pids}), or `gpuckpt restore --tree` if gpuckpt held it"
        )
    bad = [
        f"{process.id.pid}: {process.state}"
        for process in facts.tree.cuda
        if process.state not in ("running", "unknown")
    ]
    unread = [f"{process.id.pid}" for process in facts.tree.cuda if process.state == "unknown"]
    if not bad and unread:
        return unknown(expected, f"the driver does not say it for {listing(unread)}", hint)
    return none_of(bad, expected=expected, hint=hint, fine="they are")


def _copy_bound(facts: DumpFacts) -> tuple[int | None, str]:
    """The GPU memory that will be copied, or the most it can be, and in words what that is."""
    exact = gpu_bytes(facts.tree)
    if exact is not None:
        return exact, "the job's GPU memory"
    gpus = facts.host.gpu.gpus
    used = [(g.memory_total_bytes or 0) - g.memory_free_bytes for g in gpus if g.memory_free_bytes is not None]
    if not gpus or len(used) < len(gpus):
        return None, "the job's GPU memory, which is not known"
    return sum(used), "all memory in use on this host's GPUs (the job's own is not known)"


def _own_bytes(tree: Tree, pid: int) -> int:
    return sum(use.memory_bytes or 0 for use in tree.gpu_uses if use.pid == pid)


def _copy_room(facts: DumpFacts) -> Judgement | None:
    if not facts.uses_cuda:
        return None
    amount, what = _copy_bound(facts)
    exact = gpu_bytes(facts.tree) is not None
    rooms = [MemoryLimit("the host", facts.host.memory_available_bytes), *facts.memory_limits]
    smallest = min((room for room in rooms if room.pid is None), key=lambda room: room.free_bytes)
    found = f"{smallest.name} has {size(smallest.free_bytes)} left"
    hint = f"the driver copies GPU memory into the job's own: raise the limit of {smallest.name}, or free memory there"
    if amount is None:
        return unknown(f"room in host memory for {what}", found, hint)
    need = amount + COPY_SPARE_BYTES
    expected = f"room in host memory for {size(need)}: {what}"
    if smallest.free_bytes < need:
        hint = f"{hint}; else the kernel ends the job"
        return failed(expected, found, hint) if exact else unknown(expected, found, hint)
    narrow = [
        f"{room.name} leaves {size(room.free_bytes)}"
        for room in rooms
        if room.pid is not None and room.free_bytes < _own_bytes(facts.tree, room.pid) + COPY_SPARE_BYTES
    ]
    return none_of(narrow, expected=expected, hint="raise it: prlimit --pid PID --as=unlimited", fine=found)


def _shared(facts: DumpFacts) -> Judgement | None:
    if not facts.uses_cuda:
        return None
    pids = set(facts.tree.pids)
    found = [
        f"{gpu_name(gpu)} has others too: {', '.join(str(pid) for pid in gpu.compute_pids if pid not in pids)}"
        for gpu in used_gpus(facts.tree, facts.host.gpu)
        if set(gpu.compute_pids) - pids
    ]
    hint = "others can take the memory while the job is suspended; it then stays held until there is room again"
    return none_of(found, expected="GPUs that only this job uses", hint=hint, fine="no others")


def _managed(facts: DumpFacts) -> Judgement | None:
    if not facts.uses_cuda:
        return None
    holders = [
        f"{process.id.pid} {process.comm}: {size(file.managed_bytes)}"
        for process in facts.tree.processes
        for file in process.gpu_files
        if file.managed_bytes
    ]
    return none_of(
        holders,
        expected="no managed (UVM) memory",
        hint="the driver's checkpoint does not support it: the job has to do without cudaMallocManaged",
        fine="none is mapped",
        severity="note" if major(facts.host.gpu) > NO_MANAGED_UP_TO else None,
    )


def _persistence(facts: HasGpuJob) -> Judgement | None:
    if not facts.uses_cuda:
        return None
    off = [gpu_name(gpu) for gpu in facts.host.gpu.gpus if gpu.persistence_mode is False]
    hint = "`nvidia-smi -pm 1` (or nvidia-persistenced) makes CUDA restores start faster; gpuckpt works without"
    return none_of(off, expected="persistence mode on", hint=hint, fine="on")


# What two NCCL ranks need, seen on an H200 with driver 580: without both parts the driver agrees to lock and
# checkpoint, and then the restore fails and every rank is lost.
NCCL_HINT = (
    "start the job with NCCL_P2P_DISABLE=1 NCCL_SHM_DISABLE=1 (or NCCL_P2P_DISABLE=1 NCCL_CUMEM_ENABLE=0 "
    "NCCL_CUMEM_HOST_ENABLE=0) and `sysctl kernel.io_uring_disabled=2`; as it is, the driver saves it and cannot "
    "restore it: all ranks would be lost"
)


def nccl_is_safe(environment: Mapping[str, str]) -> bool:
    """Whether NCCL was told to share no memory that the driver cannot restore."""
    off = {name for name in ("NCCL_CUMEM_ENABLE", "NCCL_CUMEM_HOST_ENABLE") if environment.get(name) == "0"}
    shares_nothing = environment.get("NCCL_SHM_DISABLE") == "1" or len(off) == 2
    return environment.get("NCCL_P2P_DISABLE") == "1" and shares_nothing


def _users_of(tree: Tree, library: str) -> set[int]:
    uses = (use for file in tree.files if library in file.path.rpartition("/")[2] for use in file.uses)
    return {int(use.split()[0]) for use in uses if use.split()[0].isdigit()}


def _nccl_traces(tree: Tree, pids: set[int]) -> list[str]:
    """Signs that ranks have found each other: NCCL's own socket and shared files, or a connection between them."""
    signs = [f"socket {s.local}" for s in tree.sockets if "nccl-socket" in s.local]
    signs += [f.path for f in tree.files if f.path.startswith("/dev/shm/nccl-")]  # noqa: S108 - the name NCCL gives them
    ends: dict[tuple[str, str], set[int]] = {}
    for s in tree.sockets:
        if s.family in ("inet", "inet6") and s.remote and s.inside:
            ends[s.local, s.remote] = {int(owner.split()[0]) for owner in s.owners} & pids
    for (local, remote), near in ends.items():
        far = ends.get((remote, local), set())
        if local < remote and near and far and len(near | far) > 1:
            signs.append(f"connection {local} - {remote}")
    return signs


def _nccl(facts: DumpFacts) -> Judgement | None:
    pids = {process.id.pid for process in facts.tree.cuda} & _users_of(facts.tree, "libnccl")
    if len(pids) < 2:
        return None
    expected = "several CUDA processes share no memory through NCCL"
    signs = _nccl_traces(facts.tree, pids)
    if not signs:
        return passed(expected, f"{len(pids)} processes have libnccl loaded, none is connected to another")
    environment = facts.nccl_environment or {}
    unread = sorted(pids - environment.keys())
    unsafe = [pid for pid in sorted(pids & environment.keys()) if not nccl_is_safe(environment[pid])]
    if unsafe:
        texts = (f"{pid}: {_settings(environment[pid])}" for pid in unsafe)
        return failed(expected, f"{listing(texts)}; signs: {listing(signs)}", NCCL_HINT)
    if unread:
        return unknown(expected, f"the environment of {', '.join(map(str, unread))} could not be read", NCCL_HINT)
    return passed(expected, f"{len(pids)} ranks with {_settings(environment[min(pids)])}")


def _huge_pages(facts: CopiesGpu) -> Judgement | None:
    setting = facts.host.transparent_huge_pages
    if not facts.uses_cuda or setting is None:
        return None
    expected = "transparent huge pages `always` while GPU memory is copied"
    if setting == "always" or facts.huge_pages:
        return passed(expected, setting if setting == "always" else "--huge-pages")
    hint = (
        "--huge-pages on dump and restore sets it for that time: 16 GiB took 5.7-6.7 s instead of 8.0-9.7 s to "
        "checkpoint and 2.7-3.0 s instead of 3.1-3.5 s to restore (H200, driver 580)"
    )
    return failed(expected, setting, hint)


def _settings(environment: Mapping[str, str]) -> str:
    wanted = ("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "NCCL_CUMEM_ENABLE", "NCCL_CUMEM_HOST_ENABLE")
    return " ".join(f"{name}={environment[name]}" for name in wanted if name in environment) or "NCCL's defaults"


GPU_DRIVER: Check[UsesGpu] = Check("gpu-driver", "block", "the NVIDIA driver can suspend processes", _driver, status=10)
GPU_FEATURES: Check[DumpFacts] = Check(
    "gpu-features", "warn", "the driver is new enough for what the job uses", _driver_features
)
GPU_BUGS: Check[UsesGpu] = Check("gpu-bugs", "warn", "the driver has no known bug in checkpoints", _driver_bugs)
GPU_READABLE: Check[DumpFacts] = Check("gpu-readable", "block", "the job's GPUs answer", _readable)
GPU_MIG: Check[DumpFacts] = Check("gpu-mig", "block", "the job's GPUs are not in MIG mode", _mig)
GPU_MPS: Check[HasGpuJob] = Check("gpu-mps", "block", "MPS does not run", _mps)
GPU_FILES: Check[DumpFacts] = Check(
    "gpu-files", "block", "GPU files are open only in processes that can be suspended", _gpu_files, allowable=False
)
GPU_STATE: Check[DumpFacts] = Check("gpu-state", "block", "no CUDA process is already suspended", _state)
GPU_COPY_ROOM: Check[DumpFacts] = Check(
    "gpu-copy-room", "block", "host and cgroups have room for the copy of the GPU memory", _copy_room
)
GPU_SHARED: Check[DumpFacts] = Check("gpu-shared", "note", "nobody else uses the job's GPUs", _shared)
GPU_MANAGED: Check[DumpFacts] = Check("gpu-managed", "block", "the job uses no managed memory", _managed)
GPU_PERSISTENCE: Check[HasGpuJob] = Check("gpu-persistence", "note", "persistence mode is on", _persistence)
HUGE_PAGES: Check[CopiesGpu] = Check(
    "huge-pages", "note", "the host has transparent huge pages, or --huge-pages asks for them", _huge_pages
)
NCCL: Check[DumpFacts] = Check(
    "nccl-sharing", "block", "CUDA processes share no memory through NCCL", _nccl, irreversible=True
)

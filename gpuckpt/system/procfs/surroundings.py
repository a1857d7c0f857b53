"""Who started and supervises a tree: systemd, Slurm, a container runtime, a terminal."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

from gpuckpt.model.facts import Surroundings
from gpuckpt.system.procfs.cgroups import memberships, memory_limits
from gpuckpt.system.procfs.descriptors import is_pty_slave, slave_number
from gpuckpt.system.procfs.identity import ancestors
from gpuckpt.system.procfs.reading import comm_of, decode, read_bytes

if TYPE_CHECKING:
    from collections.abc import Collection

    from gpuckpt.model.facts import Process

UNIT = re.compile(r"[^/]+\.(?:service|scope)(?=/|$)")
SLURM_JOB = re.compile(r"/job_(\d+)(?:/|$)")
SLURM_STEP = re.compile(r"/step_([^/]+)(?:/|$)")

CONTAINERS = (
    (re.compile(r"/docker[-/]([0-9a-f]{64})"), "docker"),
    (re.compile(r"/libpod-(?:payload-)?([0-9a-f]{64})"), "podman"),
    (re.compile(r"/crio-([0-9a-f]{64})"), "cri-o"),
    (re.compile(r"/cri-containerd-([0-9a-f]{64})"), "containerd"),
    (re.compile(r"/nerdctl-([0-9a-f]{64})"), "containerd"),
    (re.compile(r"/lxc(?:\.payload\.|/)([^/]+)"), "lxc"),
    (re.compile(r"/machine\.slice/machine-(?!qemu)([^/]+)\.scope"), "systemd-nspawn"),
    (re.compile(r"/([0-9a-f]{64})(?:\.scope)?(?:/|$)"), "unknown"),
)
"""Cgroup names of the runtimes' drivers, most telling first."""

APPTAINER = ("APPTAINER_CONTAINER", "SINGULARITY_CONTAINER")
"""Environment names; Apptainer has no cgroup of its own."""

ISOLATING = "gpuckpt-init"
"""What process 1 of the namespaces of a restored tree calls itself (system/nsinit.py)."""


def surroundings_of(root: Process, tree: Collection[Process], inner_terminals: Collection[int]) -> Surroundings:
    """Who supervises the tree of `root`. `inner_terminals` are the numbers of the ptys whose master the tree holds.

    `systemd_restart` stays None: only systemd knows it.
    """
    paths = tuple(group.path for group in memberships(root.pid))
    job, step = _slurm(root.pid, paths)
    container, runtime = container_in(paths)
    if runtime is None and any(name == ISOLATING for _, name in [(root.pid, comm_of(root.pid)), *ancestors(root.pid)]):
        runtime = "gpuckpt"
    if runtime is None and any(name in root.environment_names for name in APPTAINER):
        runtime = "apptainer"
    limits = [limit.limit_bytes for limit in memory_limits(root.pid)]
    return Surroundings(
        systemd_unit=unit_in(paths),
        slurm_job_id=job,
        slurm_step_id=step,
        container_id=container,
        container_runtime=runtime,
        cgroup_memory_limit_bytes=min(limits, default=None),
        # Only the root's session can have its leader outside: every other session of the tree began inside it.
        session_leader_inside=root.sid == root.pid,
        has_terminal=any(_has_outside_terminal(process, inner_terminals) for process in tree),
    )


def unit_in(paths: Collection[str]) -> str | None:
    """The innermost systemd service or scope in cgroup paths."""
    for path in paths:
        units = UNIT.findall(path)
        if units:
            return str(units[-1])
    return None


def slurm_in(paths: Collection[str]) -> tuple[str | None, str | None]:
    """Slurm's (job id, step id) in cgroup paths: '…/job_123/step_batch/…'."""
    for path in paths:
        job, step = SLURM_JOB.search(path), SLURM_STEP.search(path)
        if job and "slurm" in path:
            return job[1], step[1] if step else None
    return None, None


def _slurm(pid: int, paths: Collection[str]) -> tuple[str | None, str | None]:
    job, step = slurm_in(paths)
    if job is not None:
        return job, step
    # Without the cgroup plugin Slurm leaves its ids in the environment alone. These two are no secrets.
    values = environment_values(pid, ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    return values.get("SLURM_JOB_ID"), values.get("SLURM_STEP_ID")


def environment_values(pid: int, names: Collection[str]) -> dict[str, str]:
    """The values of these few variables with which a process was started. Never for names that may hold secrets."""
    entries = (entry.partition("=") for entry in decode(read_bytes(f"/proc/{pid}/environ") or b"").split("\0"))
    return {name: value for name, equals, value in entries if equals and name in names}


def container_in(paths: Collection[str]) -> tuple[str | None, str | None]:
    """(id, runtime) of a container in cgroup paths; the runtime is 'unknown' when only an id tells."""
    for pattern, runtime in CONTAINERS:
        for path in paths:
            match = pattern.search(path)
            if match:
                return match[1], runtime
    return None, None


def _has_outside_terminal(process: Process, inner_terminals: Collection[int]) -> bool:
    if process.controlling_tty == 0:
        return False
    device = tty_device(process.controlling_tty)
    return not is_pty_slave(device) or slave_number(device) not in inner_terminals


def tty_device(number: int) -> int:
    """st_rdev of the terminal number in /proc/PID/stat, which is in the kernel's 32-bit form (new_encode_dev)."""
    return os.makedev((number >> 8) & 0xFFF, (number & 0xFF) | ((number >> 12) & 0xFFF00))

"""Success is looked at: a tree that should run is watched for some seconds before it is called good."""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING

from gpuckpt.accelerators.cuda_probe import ProbeFailed, cuda_processes
from gpuckpt.model.errors import RestoredUnhealthy
from gpuckpt.system import procfs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gpuckpt.flows.machine import Machine
    from gpuckpt.model.facts import ProcessId
    from gpuckpt.owner.messages import Seen, TreeOrder

STEP_SECONDS = 0.1
REST_SECONDS = 5.0


def require_alive(ids: Sequence[ProcessId], seconds: float) -> None:
    """Watch the root for `seconds`; raises RestoredUnhealthy when it ends meanwhile.

    Only the root: its children may well finish their work in these seconds.
    """
    with procfs.Watched(ids[0]) as root:
        if stays_alive(ids, seconds):
            return
        why = f"process {ids[0].pid} ended within {seconds:g} s{how_it_ended(root.wait_status())}"
    raise RestoredUnhealthy(why, "its own output says why", process="gone")


def how_it_ended(wait_status: int | None) -> str:
    """', exit status 3', ', killed by SIGSEGV', or '' where nobody can tell any more."""
    if wait_status is None:
        return ""
    code = os.waitstatus_to_exitcode(wait_status)
    names = {one.value: one.name for one in signal.Signals}
    return f", exit status {code}" if code >= 0 else f", killed by {names.get(-code, f'signal {-code}')}"


def stays_alive(ids: Sequence[ProcessId], seconds: float) -> bool:
    """Whether the root lives for `seconds`, watched until then."""
    deadline = time.monotonic() + seconds
    while procfs.state(ids[0]) not in procfs.ENDED:
        if time.monotonic() >= deadline:
            return True
        time.sleep(STEP_SECONDS)
    return False


def require_on_gpu(tree: TreeOrder, machine: Machine, *, force_program: bool) -> dict[int, int]:
    """CUDA runs again and the memory is on a GPU; returns bytes by pid. Raises RestoredUnhealthy."""
    if not tree.cuda:
        return {}
    try:
        seen = {one.id.pid: one.state for one in cuda_processes([m.id for m in tree.cuda], force_program=force_program)}
    except ProbeFailed as error:
        raise RestoredUnhealthy(str(error), "look at the job yourself", process="restored") from None
    for member in tree.cuda:
        if seen.get(member.id.pid) != "running":
            state = seen.get(member.id.pid, "not there")
            raise RestoredUnhealthy(
                f"process {member.id.pid} is back, but its CUDA state is {state}",
                f"run `gpuckpt restore --tree {tree.root.pid}`",
                process="restored",
            )
    return _memory_by_pid(tree, machine)


def _memory_by_pid(tree: TreeOrder, machine: Machine) -> dict[int, int]:
    accelerator = machine.accelerator()
    uses = accelerator.uses([member.id.pid for member in tree.cuda]) if accelerator else ()
    found: dict[int, int] = {}
    for use in uses:
        found[use.pid] = found.get(use.pid, 0) + (use.memory_bytes or 0)
    for member in tree.cuda:
        wanted = sum(member.memory_bytes.values())
        # Half is far from what any driver version differs by; NVML that shows nothing at all proves nothing.
        if found and wanted and found.get(member.id.pid, 0) < wanted // 2:
            raise RestoredUnhealthy(
                f"process {member.id.pid} has {found.get(member.id.pid, 0)} bytes on its GPUs, {wanted} at the dump",
                "look at the job yourself",
                process="restored",
            )
    return found


def all_end(seen: Sequence[Seen]) -> bool:
    """Whether all have ended, or do so now: what a dead CRIU leaves of a tree can take seconds to end too."""
    rest = [found for one in seen if one.state != "gone" and (found := procfs.process_id(one.pid)) is not None]
    until = time.monotonic() + REST_SECONDS
    while any(procfs.state(one) not in procfs.ENDED for one in rest):
        if time.monotonic() > until:
            return False
        time.sleep(0.05)
    return bool(seen)

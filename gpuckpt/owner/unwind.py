"""Unwinding by looking, not by believing.

After any failure each process is asked for its CUDA state and its /proc state, and what is right for
that state is done: checkpointed -> restore and unlock, locked -> unlock, stopped by us -> continue. The
result says of each process whether it was seen running, frozen or gone.
"""

from __future__ import annotations

import signal
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from gpuckpt.accelerators.protocol import DriverError
from gpuckpt.owner import gpumemory
from gpuckpt.owner.messages import Seen, TreeOrder
from gpuckpt.owner.suspension import ResumeFailed, resume_all, unlock_all
from gpuckpt.system import netfilter, procfs

if TYPE_CHECKING:
    from collections.abc import Callable

    from gpuckpt.accelerators.protocol import Suspender
    from gpuckpt.model.facts import CudaState, GpuDriver, ProcessId
    from gpuckpt.owner.journal import Journal

MEMORY_WAIT_SECONDS = 30.0
"""How long a resume waits for GPU memory when the operation has no deadline of its own."""


@dataclass(frozen=True, slots=True)
class Unwound:
    """What became of the tree."""

    seen: tuple[Seen, ...]
    problem: str = ""

    @property
    def state(self) -> str:
        """'running' when every process that lives runs (or is stopped as before), else 'frozen' or 'gone'."""
        states = {one.state for one in self.seen}
        if "frozen" in states:
            return "frozen"
        return "running" if "running" in states else "gone"


@dataclass(frozen=True, slots=True)
class Means:
    """What the unwind works with. `suspender` is None where the tree has no CUDA."""

    suspender: Suspender | None
    journal: Journal
    driver: Callable[[], GpuDriver]
    deadline: float | None = None


def unwind(tree: TreeOrder, means: Means) -> Unwound:
    """Bring the tree back to running, whatever state it is in, and say what was seen."""
    means.journal.write("unwind")
    tree = with_newcomers(tree)
    problem = _unwind_cuda(tree, means) if means.suspender is not None else ""
    if not problem:
        _continue_stopped(tree)
    return Unwound(look(tree, means.suspender), problem)


def with_newcomers(tree: TreeOrder) -> TreeOrder:
    """The order, with processes that the tree has started since."""
    fresh = tuple(identity for identity in procfs.tree_ids(tree.root) if identity not in tree.ids)
    return replace(tree, ids=tree.ids + fresh)


def _unwind_cuda(tree: TreeOrder, means: Means) -> str:
    """Resume CUDA processes by their state; returns what could not be done, in words."""
    assert means.suspender is not None  # noqa: S101 - the caller looked
    states = {member.id: cuda_state(means.suspender, member.id.pid) for member in tree.cuda}
    checkpointed = tuple(m for m in tree.cuda if states[m.id] == "checkpointed")
    locked = tuple(m for m in tree.cuda if states[m.id] == "locked")
    if checkpointed:
        return _resume_checkpointed(
            replace(tree, cuda=checkpointed), locked_too=replace(tree, cuda=locked), means=means
        )
    errors = unlock_all(replace(tree, cuda=locked), means.suspender)
    return str(errors[0]) if errors else ""


def _resume_checkpointed(tree: TreeOrder, *, locked_too: TreeOrder, means: Means) -> str:
    assert means.suspender is not None  # noqa: S101 - the caller looked
    missing = gpumemory.await_room(tree.cuda, means.driver, means.deadline or time.monotonic() + MEMORY_WAIT_SECONDS)
    if missing:
        return missing
    try:
        resume_all(tree, means.suspender, means.journal, gpu_map={}, exitkill=False)
    except ResumeFailed as error:
        return str(error)
    errors = unlock_all(locked_too, means.suspender)
    return str(errors[0]) if errors else ""


def _continue_stopped(tree: TreeOrder) -> None:
    for identity in tree.ids:
        if identity not in tree.stopped and procfs.state(identity) == "T":
            procfs.send(identity, signal.SIGCONT)


def cuda_state(suspender: Suspender, pid: int) -> CudaState:
    """The CUDA state, or 'unknown' where the driver does not say."""
    try:
        return suspender.state(pid)
    except DriverError:
        return "unknown"


SETTLE_SECONDS = 1.0


def look(tree: TreeOrder, suspender: Suspender | None) -> tuple[Seen, ...]:
    """Look at each process of the tree, now."""
    cuda = {member.id for member in tree.cuda}
    return tuple(_look_at(one, tree, suspender if one in cuda else None) for one in tree.ids)


def _look_at(identity: ProcessId, tree: TreeOrder, suspender: Suspender | None) -> Seen:
    letter = _settled_letter(identity, expected_stopped=identity in tree.stopped)
    if letter in (None, "Z", "X"):
        return Seen(identity.pid, "gone", "ended, not yet reaped" if letter == "Z" else "")
    if letter in ("T", "t") and identity not in tree.stopped:
        return Seen(identity.pid, "frozen", f"state {letter}")
    if suspender is not None and (state := cuda_state(suspender, identity.pid)) != "running":
        return Seen(identity.pid, "frozen", f"CUDA {state}")
    return Seen(identity.pid, "running")


def _settled_letter(identity: ProcessId, *, expected_stopped: bool) -> str | None:
    """The state letter, given a moment for a SIGCONT or a detach to show."""
    deadline = time.monotonic() + SETTLE_SECONDS
    while True:
        letter = procfs.state(identity)
        if letter not in ("T", "t") or expected_stopped or time.monotonic() > deadline:
            return letter
        time.sleep(0.01)


def remove_network_lock(run_id: str | None) -> tuple[str, ...]:
    """Remove the network lock a dead CRIU left behind: behind it the tree's connections are dead."""
    return netfilter.delete_criu_tables(run_id) if run_id else ()

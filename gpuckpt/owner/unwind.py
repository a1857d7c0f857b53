"""Unwinding by looking, not by believing.

After any failure each process is asked for its CUDA state and its /proc state, and what is right for
that state is done: checkpointed -> restore and unlock, locked -> unlock, stopped by us -> continue. The
result says of each process whether it was seen running, frozen or gone.
"""

from __future__ import annotations

import signal
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from gpuckpt.model.records import dataclass
from gpuckpt.owner import gpumemory
from gpuckpt.owner.messages import Seen, TreeOrder
from gpuckpt.owner.suspension import ResumeFailed, in_parallel, resume_all, states_of
from gpuckpt.system import netfilter, procfs

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from gpuckpt.accelerators.protocol import Suspender
    from gpuckpt.model.facts import CudaState, GpuDriver, ProcessId
    from gpuckpt.owner.journal import Journal
    from gpuckpt.owner.messages import CudaMember

UNLOCK_SECONDS = 60.0
MEMORY_WAIT_SECONDS = 30.0
"""How long a resume waits for GPU memory when the operation has no deadline of its own."""


@dataclass(frozen=True, slots=True)
class Unwound:
    """What became of the tree."""

    seen: tuple[Seen, ...]
    problem: str = ""
    criu_died: bool = False

    @property
    def state(self) -> str:
        """'running' when every process that lives runs (or is stopped as before), else 'frozen' or 'gone'.

        Processes of a tree may well end by themselves meanwhile; but after CRIU died in them it is taken for
        the cause, and a tree of which a part is missing does not run as before.
        """
        states = {one.state for one in self.seen}
        if self.criu_died and "gone" in states:
            return "gone"
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
    get_ready: Callable[[], None] = lambda: None
    """`driver` will be called soon, while a tree stands still."""


def unwind(tree: TreeOrder, means: Means, *, criu_died: bool = False) -> Unwound:
    """Bring the tree back to running, whatever state it is in, and say what was seen.

    `criu_died`: CRIU's code may still be in the processes, and they end by it as soon as they run.
    """
    means.journal.write("unwind")
    tree = with_newcomers(tree)
    problem = _unwind_cuda(tree, means) if means.suspender is not None else ""
    if not problem:
        _continue_stopped(tree)
    if criu_died:
        _watch(tree)
    return Unwound(look(tree, means.suspender), problem, criu_died)


def doubted(unwound: Unwound, tree: TreeOrder) -> Unwound:
    """What was stopped before may have a dead CRIU's code in it as well: that shows only when somebody lets it go on.

    For the run in which it happened. A repair that is asked for afterwards takes it as it is, stopped as before:
    otherwise the run could never be cleared away.
    """
    if not unwound.criu_died:
        return unwound
    stopped = {one.pid for one in tree.stopped if procfs.state(one) in STOPPED}
    words = "stopped as before, and CRIU died in it: it may end when it goes on"
    return replace(
        unwound, seen=tuple(Seen(one.pid, "frozen", words) if one.pid in stopped else one for one in unwound.seen)
    )


def _watch(tree: TreeOrder) -> None:
    """Give the tree time to die of what CRIU left in it, and its other processes time to die of that."""
    deadline = time.monotonic() + WATCH_SECONDS
    while time.monotonic() < deadline and any(procfs.state(one) not in procfs.ENDED for one in tree.ids):
        time.sleep(0.01)


def with_newcomers(tree: TreeOrder) -> TreeOrder:
    """The order, with processes that the tree has started since."""
    fresh = tuple(identity for identity in procfs.tree_ids(tree.root) if identity not in tree.ids)
    return replace(tree, ids=tree.ids + fresh)


def _unwind_cuda(tree: TreeOrder, means: Means) -> str:
    """Resume CUDA processes by their state; returns what could not be done, in words."""
    assert means.suspender is not None  # noqa: S101 - the caller looked
    alive = replace(tree, cuda=tuple(member for member in tree.cuda if procfs.state(member.id) not in procfs.ENDED))
    if not alive.cuda:
        return ""
    if not any(procfs.state(one) == "T" and one not in tree.stopped for one in tree.ids):
        states = states_of(alive.cuda, means.suspender)
        if not any(state in ("checkpointed", "unknown", "failed") for state in states.values()):
            return _unlock([member for member in alive.cuda if states[member.id] == "locked"], means)
    return _resume_held(alive, means)


def _unlock(members: Sequence[CudaMember], means: Means) -> str:
    """An unlock needs no hold: it must work where a thread cannot be held (uninterruptible sleep)."""
    suspender = means.suspender
    assert suspender is not None  # noqa: S101 - the caller looked
    errors = in_parallel(members, lambda member: suspender.unlock(member.id.pid), UNLOCK_SECONDS)
    return str(errors[0]) if errors else ""


def _resume_held(tree: TreeOrder, means: Means) -> str:
    """A stopped process cannot be asked for its state: all is held, and asked and resumed then."""
    assert means.suspender is not None  # noqa: S101 - the caller looked
    deadline = means.deadline or time.monotonic() + MEMORY_WAIT_SECONDS
    try:
        resume_all(
            tree,
            means.suspender,
            means.journal,
            room=lambda members: gpumemory.await_room(members, means.driver, deadline),
            gpu_map={},
            exitkill=False,
        )
    except ResumeFailed as error:
        return str(error)
    return ""


def _continue_stopped(tree: TreeOrder) -> None:
    for identity in tree.ids:
        if identity not in tree.stopped and procfs.state(identity) == "T":
            procfs.send(identity, signal.SIGCONT)


SETTLE_SECONDS = 1.0
WATCH_SECONDS = 1.5
STOPPED = ("T", "t")
ENDING_SECONDS = 0.3
"""How long a SIGKILL of CRIU's may take to show in /proc."""


def has_gone_on(tree: TreeOrder, *, criu_died: bool) -> bool:
    """Whether a tree that should end runs instead: something of it lives and is not held.

    Looked at for a moment: where CRIU was killed while it ended the tree, that shows in /proc soon. A part that
    ends after CRIU died has been taken along by it: that is no tree that goes on.
    """
    deadline = time.monotonic() + (WATCH_SECONDS if criu_died else ENDING_SECONDS)
    while True:
        letters = [procfs.state(identity) for identity in tree.ids]
        if criu_died and any(letter in procfs.ENDED for letter in letters):
            return False
        if not any(letter not in (*STOPPED, *procfs.ENDED) for letter in letters):
            return False
        if time.monotonic() > deadline:
            return True
        time.sleep(0.01)


def end_all(tree: TreeOrder) -> None:
    """SIGKILL every process of the tree, those included that it has started meanwhile."""
    for identity in with_newcomers(tree).ids:
        procfs.send(identity, signal.SIGKILL)


def look(tree: TreeOrder, suspender: Suspender | None) -> tuple[Seen, ...]:
    """Look at each process of the tree, now."""
    letters = {one: _settled_letter(one, expected_stopped=one in tree.stopped) for one in tree.ids}
    answering = [member for member in tree.cuda if letters.get(member.id) not in (*procfs.ENDED, *STOPPED)]
    states = states_of(answering, suspender) if suspender is not None else {}
    return tuple(_judge(one, letters[one], states.get(one, "running"), tree) for one in tree.ids)


def _judge(identity: ProcessId, letter: str | None, cuda: CudaState, tree: TreeOrder) -> Seen:
    if letter in procfs.ENDED:
        return Seen(identity.pid, "gone", "ended, not yet reaped" if letter == "Z" else "")
    if letter in STOPPED and identity not in tree.stopped:
        return Seen(identity.pid, "frozen", f"state {letter}")
    if cuda != "running":
        return Seen(identity.pid, "frozen", f"CUDA {cuda}")
    return Seen(identity.pid, "running")


def _settled_letter(identity: ProcessId, *, expected_stopped: bool) -> str | None:
    """The state letter, given a moment for a SIGCONT or a detach to show."""
    deadline = time.monotonic() + SETTLE_SECONDS
    while True:
        letter = procfs.state(identity)
        if letter not in STOPPED or expected_stopped or time.monotonic() > deadline:
            return letter
        time.sleep(0.01)


def remove_network_lock(run_id: str | None) -> tuple[str, ...]:
    """Remove the network lock a dead CRIU left behind: behind it the tree's connections are dead.

    Never raises: the tree must be brought back whatever becomes of its lock.
    """
    try:
        return netfilter.delete_criu_tables(run_id) if run_id else ()
    except OSError:
        return ()

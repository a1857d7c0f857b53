"""Suspending a tree's CUDA processes at one instant, and resuming them.

suspend   lock all while they run (an application thread frozen inside a CUDA call would keep the lock
          from being taken) -> hold every thread but the restore threads -> checkpoint all -> queue SIGSTOP
          -> let go: CRIU then dumps tasks in state T, and no instruction ran in between.
resume    hold every thread but the restore threads -> SIGCONT (only the restore threads run) ->
          restore all -> unlock all -> let go.

A crash while locking leaves processes locked; after the checkpoint it leaves them checkpointed and
stopped. `unwind` brings either back, by looking.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from gpuckpt.accelerators.protocol import DriverError
from gpuckpt.system import procfs
from gpuckpt.system.hold import Hold, HoldError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from gpuckpt.accelerators.protocol import Suspender
    from gpuckpt.model.facts import CudaState, ProcessId
    from gpuckpt.owner.journal import Journal
    from gpuckpt.owner.messages import CudaMember, TreeOrder

HOLD_SECONDS = 10.0
STOP_SECONDS = 10.0


class SuspendFailed(Exception):
    """The tree could not be suspended; the message is for the user, the unwind is the caller's."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class ResumeFailed(Exception):
    """A process could not be resumed; the message is for the user."""


def in_parallel(members: Sequence[CudaMember], act: Callable[[CudaMember], None]) -> list[Exception]:
    """Do one driver call for all members at once and return what failed.

    At once, because a locked rank blocks calls on its peer (https://github.com/NVIDIA/cuda-checkpoint/issues/30).
    """
    if not members:
        return []
    with ThreadPoolExecutor(max_workers=len(members)) as pool:
        futures = [pool.submit(act, member) for member in members]
        return [error for future in futures if isinstance(error := future.exception(), Exception)]


def lock_all(tree: TreeOrder, suspender: Suspender, timeout_ms: int, journal: Journal) -> None:
    """Lock every CUDA process; raises SuspendFailed after the first round of answers."""
    journal.write("lock", pids=[member.id.pid for member in tree.cuda])
    errors = in_parallel(tree.cuda, lambda member: suspender.lock(member.id.pid, timeout_ms))
    if errors:
        raise SuspendFailed(str(errors[0]), "raise --lock-timeout if the job's GPU work takes longer")


def checkpoint_all(tree: TreeOrder, suspender: Suspender, journal: Journal) -> None:
    """Copy every process's GPU memory to the host, all at one instant of the CPU side."""
    journal.write("hold")
    hold = Hold(exitkill=False)
    try:
        hold_all_but_restore_threads(hold, tree)
        _refuse_newcomers(tree, suspender)
        journal.write("checkpoint")
        errors = in_parallel(tree.cuda, lambda member: suspender.checkpoint(member.id.pid))
        if errors:
            raise SuspendFailed(str(errors[0]))
        _refuse_leftovers(tree)
        journal.write("stop")
        for identity in tree.ids:
            procfs.send(identity, signal.SIGSTOP)
    except HoldError as error:
        raise SuspendFailed(f"the tree could not be held still: {error}") from None
    finally:
        hold.let_go()
    await_stopped(tree.ids, time.monotonic() + STOP_SECONDS)


def hold_all_but_restore_threads(hold: Hold, tree: TreeOrder) -> None:
    """Hold every thread of the tree but the driver's own ones, in CUDA processes."""
    spared = {member.restore_tid for member in tree.cuda}

    def application_threads() -> list[int]:
        pids = [identity.pid for identity in procfs.tree_ids(tree.root)]
        return [tid for pid in pids for tid in procfs.threads(pid) if tid not in spared]

    hold.take_all(application_threads, time.monotonic() + HOLD_SECONDS)


def _refuse_newcomers(tree: TreeOrder, suspender: Suspender) -> None:
    """A process that came, or started CUDA, after the facts were gathered would be dumped half suspended."""
    known = set(tree.ids)
    suspended = {member.id for member in tree.cuda}
    for identity in procfs.tree_ids(tree.root):
        if identity not in known:
            raise SuspendFailed(f"the tree changed: process {identity.pid} is new", "try again")
        if identity not in suspended and suspender.restore_tid(identity.pid) is not None:
            raise SuspendFailed(f"process {identity.pid} started to use CUDA just now", "try again")


def _refuse_leftovers(tree: TreeOrder) -> None:
    """After the suspension no process may have a GPU file left: CRIU cannot dump it, or worse, dumps it."""
    for identity in tree.ids:
        left = procfs.gpu_files(identity.pid)
        if left:
            first = left[0]
            raise SuspendFailed(
                f"process {identity.pid} still holds {first.path} ({first.where}) after the suspension",
                "it inherited the GPU files by fork without using CUDA: start workers with the spawn method",
            )


def await_stopped(ids: Sequence[ProcessId], deadline: float) -> None:
    """Wait until the queued SIGSTOP shows; raises SuspendFailed."""
    for identity in ids:
        while (letter := procfs.state(identity)) not in ("T", "Z", None):
            if time.monotonic() > deadline:
                raise SuspendFailed(f"process {identity.pid} did not stop (state {letter})")
            time.sleep(0.001)


def resume_all(
    tree: TreeOrder,
    suspender: Suspender,
    journal: Journal,
    *,
    room: Callable[[Sequence[CudaMember]], str],
    gpu_map: Mapping[str, str],
    exitkill: bool,
    hold: Hold | None = None,
) -> None:
    """Give CUDA processes back what their state says they lack, and let the tree run.

    The state is asked only while the restore threads run: a stopped process does not answer. `room`
    says what GPU memory is missing for these processes, after waiting for it. With `exitkill` (restore)
    the half-built tree ends with us; a `hold` that has the application's threads already is taken over.
    Raises ResumeFailed; the tree is then as the driver left it, and stopped.
    """
    hold = hold or Hold(exitkill=exitkill)
    done = False
    try:
        hold_all_but_restore_threads(hold, tree)
        for member in tree.cuda:
            procfs.send(member.id, signal.SIGCONT)
        _bring_back(tree.cuda, suspender, journal, room=room, gpu_map=gpu_map)
        done = True
    except HoldError as error:
        raise ResumeFailed(str(error)) from None
    finally:
        if done:
            let_run(tree, hold, journal, exitkill=exitkill)
        else:
            _leave_stopped(tree, hold)


def _bring_back(
    members: Sequence[CudaMember],
    suspender: Suspender,
    journal: Journal,
    *,
    room: Callable[[Sequence[CudaMember]], str],
    gpu_map: Mapping[str, str],
) -> None:
    states = states_of(members, suspender)
    for member in members:
        if states[member.id] in ("failed", "unknown"):
            raise ResumeFailed(f"the driver says that the CUDA state of process {member.id.pid} is {states[member.id]}")
    checkpointed = [member for member in members if states[member.id] == "checkpointed"]
    if checkpointed:
        missing = room(checkpointed)
        if missing:
            raise ResumeFailed(missing)
        suspender.prepare()
        journal.write("cuda-restore")
        _act(checkpointed, lambda member: suspender.restore(member.id.pid, gpu_map))
    journal.write("cuda-unlock")
    _act(
        [member for member in members if states[member.id] != "running"],
        lambda member: suspender.unlock(member.id.pid),
    )


STATE_SECONDS = 30.0


def states_of(members: Sequence[CudaMember], suspender: Suspender) -> dict[ProcessId, CudaState]:
    """The CUDA states, asked all at once; 'unknown' where the driver does not answer in time."""
    found: dict[ProcessId, CudaState] = dict.fromkeys((member.id for member in members), "unknown")

    def ask(member: CudaMember) -> None:
        with contextlib.suppress(DriverError):
            found[member.id] = suspender.state(member.id.pid)

    threads = [threading.Thread(target=ask, args=(member,), daemon=True) for member in members]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + STATE_SECONDS
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return dict(found)


def _act(members: Sequence[CudaMember], act: Callable[[CudaMember], None]) -> None:
    errors = in_parallel(members, act)
    if errors:
        raise ResumeFailed(str(errors[0])) from errors[0]


def _leave_stopped(tree: TreeOrder, hold: Hold) -> None:
    """Let a tree that is not whole go from the hold, but not run."""
    for identity in tree.ids:
        procfs.send(identity, signal.SIGSTOP)
    hold.let_go()


def let_run(tree: TreeOrder, hold: Hold, journal: Journal, *, exitkill: bool) -> None:
    """Let the held tree go, whole as it is: running, stopped where it was stopped before the dump."""
    for identity in tree.ids:
        procfs.send(identity, signal.SIGSTOP if identity in tree.stopped else signal.SIGCONT)
    if exitkill:
        hold.clear_exitkill()
    journal.write("let-go")
    hold.let_go()

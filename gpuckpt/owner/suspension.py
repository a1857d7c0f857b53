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

import signal
import threading
import time
from typing import TYPE_CHECKING

from gpuckpt.accelerators import DriverError, asking
from gpuckpt.owner.prefault import ahead_of_copies
from gpuckpt.system import procfs
from gpuckpt.system.hold import Hold, HoldError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from gpuckpt.accelerators.protocol import Suspender
    from gpuckpt.model.facts import CudaState, ProcessId
    from gpuckpt.owner.journal import Journal
    from gpuckpt.owner.messages import CudaMember, TreeOrder

HOLD_SECONDS = 10.0
COPY_SECONDS = 1800.0
"""More than the copy of any GPU's memory takes; a driver that is silent for longer will not answer."""

LOCK_MARGIN_SECONDS = 10.0
PATIENCE_SECONDS = 60.0
STOP_SECONDS = 10.0


class SuspendFailed(Exception):
    """The tree could not be suspended; the message is for the user, the unwind is the caller's."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class ResumeFailed(Exception):
    """A process could not be resumed; the message is for the user."""


class NoRoom(ResumeFailed):
    """GPUs have too little free memory; nothing was restored yet, so that it can be tried again."""


def in_parallel(
    members: Sequence[CudaMember], act: Callable[[CudaMember], None], seconds: float = COPY_SECONDS
) -> list[Exception]:
    """Do one driver call for all members at once and return what failed.

    At once, because a locked rank blocks calls on its peer (https://github.com/NVIDIA/cuda-checkpoint/issues/30).
    A call cannot be taken back; one that has not returned after `seconds` is given up, as a failure.
    """
    failures: dict[int, Exception] = {}

    def run(member: CudaMember) -> None:
        try:
            act(member)
        except Exception as error:  # noqa: BLE001 - it is the caller's, in another thread
            failures[member.id.pid] = error

    threads = {member.id.pid: threading.Thread(target=run, args=(member,), daemon=True) for member in members}
    for thread in threads.values():
        thread.start()
    deadline = time.monotonic() + seconds
    for pid, thread in threads.items():
        thread.join(max(0.0, deadline - time.monotonic()))
        if thread.is_alive():
            failures[pid] = TimeoutError(f"the GPU driver did not answer about process {pid} within {seconds:g} s")
    return list(failures.values())


def lock_all(tree: TreeOrder, suspender: Suspender, timeout_ms: int, journal: Journal) -> None:
    """Lock every CUDA process; raises SuspendFailed after the first round of answers."""
    for member in tree.cuda:
        if procfs.state(member.id) == "T":  # its restore thread stands still: the lock would wait past its own limit
            raise SuspendFailed(f"process {member.id.pid} was stopped just now", f"kill -CONT {member.id.pid}")
    journal.write("lock", pids=[member.id.pid for member in tree.cuda])
    limit = timeout_ms / 1000 + LOCK_MARGIN_SECONDS
    errors = in_parallel(tree.cuda, lambda member: suspender.lock(member.id.pid, timeout_ms), limit)
    if errors:
        raise SuspendFailed(str(errors[0]), "raise --lock-timeout if the job's GPU work takes longer")


def checkpoint_all(
    tree: TreeOrder, suspender: Suspender, journal: Journal, deadline: float | None
) -> dict[int, list[tuple[int, int]]]:
    """Copy every process's GPU memory to the host, all at one instant of the CPU side; where the copies lie, by pid.

    A copy that has begun cannot be taken back, so the deadline is met with some patience: its end is the
    shortest way to a running tree.
    """
    journal.write("hold")
    hold = Hold(exitkill=False)
    try:
        hold_all_but_restore_threads(hold, tree)
        everyone = _everyone(tree, suspender)
        journal.write("checkpoint")
        seconds = COPY_SECONDS if deadline is None else max(0.0, deadline - time.monotonic()) + PATIENCE_SECONDS
        with ahead_of_copies(tree.cuda) as copies:
            errors = in_parallel(tree.cuda, lambda member: suspender.checkpoint(member.id.pid), seconds)
        if errors:
            raise SuspendFailed(str(errors[0]))
        _refuse_leftovers(everyone)
        journal.write("stop")
        for identity in everyone:
            procfs.send(identity, signal.SIGSTOP)
    except HoldError as error:
        raise SuspendFailed(f"the tree could not be held still: {error}") from None
    except DriverError as error:
        raise SuspendFailed(str(error), "try again") from None
    finally:
        hold.let_go()
    await_stopped(everyone, time.monotonic() + STOP_SECONDS)
    return copies


def hold_all_but_restore_threads(hold: Hold, tree: TreeOrder) -> None:
    """Hold every thread of the tree but the driver's own ones, in CUDA processes."""
    spared = {member.restore_tid for member in tree.cuda}

    def application_threads() -> list[int]:
        pids = [identity.pid for identity in procfs.tree_ids(tree.root)]
        tids = (tid for pid in pids for tid in procfs.threads(pid) if tid not in spared)
        return [tid for tid in tids if procfs.thread_state(tid) not in procfs.ENDED]

    hold.take_all(application_threads, time.monotonic() + HOLD_SECONDS)


def _everyone(tree: TreeOrder, suspender: Suspender) -> list[ProcessId]:
    """The processes that are held now, newcomers too; one that started CUDA just now would be dumped unsuspended."""
    found = procfs.tree_ids(tree.root)
    suspended = {member.id for member in tree.cuda}
    for identity in found:
        if identity in suspended or procfs.state(identity) in procfs.ENDED:
            continue
        if suspender.restore_tid(identity.pid) is not None:
            raise SuspendFailed(f"process {identity.pid} started to use CUDA just now", "try again")
    return found


def _refuse_leftovers(ids: Sequence[ProcessId]) -> None:
    """After the suspension no process may have a GPU file left: CRIU cannot dump it, or worse, dumps it."""
    for identity in ids:
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
    ready: Callable[[], None] = lambda: None,
    whole: Callable[[], None] = lambda: None,
) -> None:
    """Give CUDA processes back what their state says they lack, and let the tree run.

    The state is asked only while the restore threads run: a stopped process does not answer. `room`
    says what GPU memory is missing for these processes, after waiting for it. With `exitkill` (restore)
    the half-built tree ends with us; a `hold` that has the application's threads already is taken over. `ready`
    is called when all is back and only the hold keeps the tree; it may raise.
    For `whole` see `let_run`.
    Raises ResumeFailed; the tree is then as the driver left it, and stopped.
    """
    hold = hold or Hold(exitkill=exitkill)
    done = False
    woken = [one for one in tree.ids if procfs.state(one) == "T"]
    try:
        hold_all_but_restore_threads(hold, tree)
        for member in tree.cuda:
            procfs.send(member.id, signal.SIGCONT)
        _bring_back(tree.cuda, suspender, journal, room=room, gpu_map=gpu_map)
        ready()
        done = True
    except HoldError as error:
        raise ResumeFailed(str(error)) from None
    finally:
        if done:
            let_run(tree, hold, journal, exitkill=exitkill, whole=whole)
        else:
            _leave_as_found(woken, hold)


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
            raise NoRoom(missing)
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
    """The CUDA states of these processes; 'unknown' where the driver does not say."""
    states = asking.states_of([member.id.pid for member in members], suspender, STATE_SECONDS)
    return {member.id: states[member.id.pid] for member in members}


def _act(members: Sequence[CudaMember], act: Callable[[CudaMember], None]) -> None:
    errors = in_parallel(members, act)
    if errors:
        raise ResumeFailed(str(errors[0])) from errors[0]


def _leave_as_found(woken: Sequence[ProcessId], hold: Hold) -> None:
    """Let a tree that is not whole go from the hold: what was stopped before is stopped again."""
    for identity in woken:
        procfs.send(identity, signal.SIGSTOP)
    hold.let_go()


def let_run(
    tree: TreeOrder, hold: Hold, journal: Journal, *, exitkill: bool, whole: Callable[[], None] = lambda: None
) -> None:
    """Let the held tree go, whole as it is: running, stopped where it was stopped before the dump.

    `whole` is called when nothing can take it back any more and before an instruction of it has run.
    """
    for identity in tree.ids:
        procfs.send(identity, signal.SIGSTOP if identity in tree.stopped else signal.SIGCONT)
    if exitkill:
        hold.clear_exitkill()
    journal.write("let-go")
    whole()
    hold.let_go()

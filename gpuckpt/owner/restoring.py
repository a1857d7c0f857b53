"""The owner's part of a restore.

steps, and what a crash of the owner at each leaves:

1. criu restore, up to the gate    CRIU finds nobody at the gate and ends what it built
2. commit at the gate              without CUDA and with all its memory the tree is whole and runs from here on: it
                                   is left alone. Otherwise it comes up stopped
3. hold (EXITKILL)                 the kernel ends the held tree with us; what was not held yet is in the
                                   run's journal, and main (or the next run) ends it
4. main injects memory (lean)      as in 3. Main's end is an end of file: we end the tree
5. CUDA restore                    as in 3
   (migration: 3 to 5 in any case, then `prepared`, held as in 3 until main says go and the decision is ours)
6. journal `let-go`, let go        the tree is whole: it is left alone
In a pid namespace its process 1 ends all of it in place of 1 to 5: owner/enclosure.py.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING

from gpuckpt.model.errors import in_words
from gpuckpt.model.jsonform import to_json
from gpuckpt.owner import gpumemory, networklock
from gpuckpt.owner.criurun import Aborted, CriuFailure, CriuRun, Expired, stop_if_aborted
from gpuckpt.owner.decision import decide
from gpuckpt.owner.dumping import Clock
from gpuckpt.owner.enclosure import Enclosure
from gpuckpt.owner.gate import Gate
from gpuckpt.owner.halfbuilt import end_half_built
from gpuckpt.owner.hostchanges import HugePages
from gpuckpt.owner.identifying import find, identify, numbers_inside
from gpuckpt.owner.messages import Channel, PeerGone, TreeOrder
from gpuckpt.owner.streams import Streams
from gpuckpt.owner.suspension import HOLD_SECONDS, NoRoom, ResumeFailed, in_parallel, let_run, resume_all
from gpuckpt.owner.unwind import MEMORY_WAIT_SECONDS, Means, remove_network_lock
from gpuckpt.system import cgroups, criu, criu_log, namespaces, procfs, terminal, userfault
from gpuckpt.system.hold import Hold, HoldError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from gpuckpt.accelerators.protocol import Suspender
    from gpuckpt.model.facts import ProcessId
    from gpuckpt.owner.messages import RestoreOrder

END_SECONDS = 60.0
ASTRAY_SECONDS = 5.0
"""For a CRIU that is not at the gate: it may never come there, and what it has built has not run."""
WAIT_STEP_SECONDS = 0.1
LOCK_MS = 10_000
SUSPEND_SECONDS = 120.0
"""For the suspension of a copy that ends: a driver that does not answer must not keep it."""


class RestoreWork:
    """One restore order at work."""

    def __init__(self, order: RestoreOrder, main: Channel, means: Means) -> None:
        self._order = order
        self._main = main
        self._means = means
        self._clock = Clock()
        directory = Path(order.run_directory)
        self._gate = Gate(directory)
        plugins = directory / "plugins"
        plugins.mkdir()
        self._paths = criu.WorkPaths(Path(order.images), directory, plugins, self._gate.script)
        self._run: CriuRun | None = None
        self._cgroup: cgroups.OwnCgroup | None = None
        self._streams = Streams(order.terminal)
        self._hold: Hold | None = None
        self._enclosure: Enclosure | None = None
        self._huge_pages = HugePages(directory, wanted=order.huge_pages and means.suspender is not None)

    def close(self) -> None:
        """Close and remove what lies outside the run directory."""
        self._gate.close()
        self._gate.script.unlink(missing_ok=True)
        self._streams.close()
        if self._run is not None:
            self._run.close()
        if self._enclosure is not None:
            self._enclosure.close()

    def perform(self) -> None:
        """Do it all and tell main how it ended; after a failure nothing of the tree is left."""
        try:
            self._bring_up()
            tree = identify(self._order.tree, self._enclosure)
            if self._comes_up_held:
                self._take_hold(tree)
            if self._order.lean:
                self._let_main_inject(tree)
            self._let_run(tree)
            networklock.let_through(Path(self._order.run_directory))
        except CriuFailure as failure:
            self._fail(failure.cause, failure.remedy, failure.line)
        except NoRoom as error:
            self._fail(str(error), "repeat the command when there is room, or name other GPUs by --gpu")
        except (ResumeFailed, HoldError, OSError) as error:
            self._fail(in_words(error))
        except Expired:
            self._fail("the deadline (--timeout) passed, or CRIU made no progress any more", broken_off=True)
        except (Aborted, PeerGone):
            self._fail("the restore was broken off", broken_off=True)
        else:
            self._report(tree)

    def _bring_up(self) -> None:
        """CRIU builds the tree; at the gate main is still there, so it may come alive (or come up stopped)."""
        self._clock.begin()
        self._main.send("phase", phase="criu")
        self._huge_pages.begin()  # CRIU and main fill the memory that the driver reads
        self._run = self._start_criu()
        if self._order.tree.cuda:
            self._means.get_ready()
        self._run.await_gate(self._main, self._means.deadline, stalled_pids=[i.pid for i in self._order.tree.ids])
        comes_up_stopped = self._comes_up_held or self._order.tree.cuda
        self._means.journal.write("at-gate" if comes_up_stopped else "let-go")
        if not comes_up_stopped:
            self._let_outlive()
        if self._streams.joined is not None:
            # CRIU makes our group the terminal's foreground: Ctrl-C would reach us, and the job's reads stop it.
            terminal.make_foreground(self._streams.joined, os.getpgid(self._order.tree.root.pid))
        if not self._gate.commit():
            raise self._run.failure()
        status = self._run.await_end(END_SECONDS)
        if status is None:
            self._run.kill()
        if status != 0:
            raise self._run.failure()
        self._clock.end("criu")

    @property
    def _comes_up_held(self) -> bool:
        """There is something to do, or to wait for, before an instruction of the tree may run."""
        return self._order.lean or bool(self._order.transaction)

    def _let_outlive(self) -> None:
        """The tree is whole: what it lives in outlives us."""
        if self._enclosure is not None:
            self._enclosure.keep()

    def _start_criu(self) -> CriuRun:
        order = self._order
        inherited = [(self._streams.open(entry), entry.key) for entry in order.inherited]
        stdin = self._streams.join_terminal() if self._joins_our_session else None
        argv = criu.restore_argv(
            order.criu,
            self._paths,
            order.options,
            inherited=inherited,
            pidfile=self._paths.work / "restored.pid",
            leave_stopped=self._comes_up_held,
        )
        prefix, join = self._own_cgroup()
        inside = self._enclose()
        prefix += inside.prefix() if inside is not None else []
        return CriuRun(
            [*prefix, *argv],
            self._paths,
            self._gate,
            self._means.journal,
            stdin=stdin,
            pass_fds=[number for number, _ in inherited] + ([inside.descriptor] if inside is not None else []),
            before_exec=join,
            # A job that is no session leader joins CRIU's session and group. In ours it would be orphaned by our
            # end, and a stopped job then gets SIGHUP; the end of CRIU, whose parent is elsewhere, does nothing to it.
            new_session=not self._joins_our_session,
            enclosure=inside,
        )

    def _enclose(self) -> Enclosure | None:
        order = self._order
        if order.enclosed is None:
            return None
        if order.enclosed.pid:
            namespaces.take_orphans()  # process 1, whose parent does not stay: --wait waits for it
        self._enclosure = Enclosure(order.enclosed, order.tree.root.pid, self._means.journal)
        return self._enclosure

    @property
    def _joins_our_session(self) -> bool:
        """The job takes its terminal over from us; a session leader takes the pty as its own instead."""
        return self._order.terminal is not None and self._order.options.shell_job

    def _own_cgroup(self) -> tuple[list[str], Callable[[], None] | None]:
        name = self._order.cgroup_name
        if name is None:
            return [], None
        kind = procfs.cgroup_kind()
        if kind == "systemd":
            return cgroups.scope_prefix(name), None
        mount = procfs.cgroup2_mount()
        if mount is None or kind != "v2":
            return [], None
        cgroups.remove_empty(Path(mount))
        try:
            self._cgroup = cgroups.OwnCgroup(Path(mount), name)
        except OSError:
            return [], None
        return [], self._cgroup.join

    def _take_hold(self, tree: TreeOrder) -> None:
        """Hold every thread of the stopped tree; from here on the kernel ends it with us."""
        self._means.journal.write("held")
        self._hold = Hold(exitkill=True)
        self._hold.take_all(lambda: _threads_of(tree), time.monotonic() + HOLD_SECONDS)

    def _let_main_inject(self, tree: TreeOrder) -> None:
        """Main writes what the memory of the held tree lacks."""
        self._clock.begin()
        self._main.send("phase", phase="inject")
        pids = {number: now.pid for number, now in find(self._order.tree, self._enclosure).items()}
        with contextlib.ExitStack() as meanwhile:
            to_fill = (pids[number] for number in self._order.fill if number in pids)
            userfaults = self._userfaults(to_fill, meanwhile)
            self._main.send("held", tree=to_json(tree), pids=_keyed(pids), userfaults=_keyed(userfaults))
            self._await("injected")
        self._clock.end("inject")

    def _userfaults(self, pids: Iterable[int], meanwhile: contextlib.ExitStack) -> dict[int, int]:
        """A descriptor for the memory of each of these held processes, where there is one to be had."""
        assert self._hold is not None  # noqa: S101 - they are held
        found: dict[int, int] = {}
        for pid in pids:
            tids = self._hold.tids & set(procfs.threads(pid))
            descriptor = userfault.of_held(self._hold, pid, min(tids)) if tids else None
            if descriptor is not None:
                meanwhile.callback(os.close, descriptor)
                found[pid] = descriptor
        return found

    def _await(self, word: str) -> None:
        """Wait until main says this. Raises Aborted, PeerGone, Expired."""
        while (message := self._main.receive(WAIT_STEP_SECONDS)) is None or message["say"] != word:
            if message is not None and message["say"] == "abort":
                raise Aborted
            if self._means.deadline is not None and time.monotonic() > self._means.deadline:
                raise Expired

    def _await_go(self, tree: TreeOrder) -> None:
        """The tree is whole. In a migration it runs when the other host has given it away, and nobody else decided."""
        if not self._order.transaction:
            return
        self._means.journal.write("prepared")
        try:
            self._main.send("prepared", tree=to_json(tree), seconds=self._clock.seconds)
            self._await("go")
            self._decide(tree)
        except BaseException:
            self._suspend_again(tree)
            raise

    def _decide(self, tree: TreeOrder) -> None:
        ended = [one.pid for one in tree.ids if procfs.state(one) in procfs.ENDED]
        if ended:
            raise ResumeFailed(f"process {ended[0]} was ended by somebody while it was held")
        if decide(self._order.transaction, "go", tree.ids).word != "go":
            raise Aborted

    def _suspend_again(self, tree: TreeOrder) -> None:
        """A restored process that has to end gives its GPU back first: some drivers take the host down otherwise.

        https://github.com/NVIDIA/cuda-checkpoint/issues/53. What cannot be suspended ends all the same.
        """
        suspender = self._means.suspender
        if suspender is None:
            return
        in_parallel(tree.cuda, lambda member: suspender.lock(member.id.pid, LOCK_MS), SUSPEND_SECONDS)
        in_parallel(tree.cuda, lambda member: suspender.checkpoint(member.id.pid), SUSPEND_SECONDS)

    def _let_run(self, tree: TreeOrder) -> None:
        """Let the driver put the GPU memory back where there is any, and let a tree run that came up stopped."""
        if tree.cuda and self._means.suspender is not None:
            if self._hold is not None:
                # They must run to answer the driver; their processes are still stopped.
                self._hold.release([member.restore_tid for member in tree.cuda])
            self._give_gpu_back(tree, self._means.suspender)
        elif self._hold is not None:
            self._await_go(tree)
            let_run(tree, self._hold, self._means.journal, exitkill=True, whole=self._let_outlive)
        self._hold = None

    def _give_gpu_back(self, tree: TreeOrder, suspender: Suspender) -> None:
        """Hold the stopped tree, let the driver put the GPU memory back, let it run."""
        self._clock.begin()
        self._main.send("phase", phase="host_to_gpu")
        deadline = self._means.deadline or time.monotonic() + MEMORY_WAIT_SECONDS
        gpu_map = self._order.gpu_map
        resume_all(
            tree,
            suspender,
            self._means.journal,
            room=lambda members: gpumemory.await_room(
                members, self._means.driver, deadline, gpu_map, self._is_given_up
            ),
            gpu_map=gpu_map,
            exitkill=True,
            hold=self._hold,
            ready=lambda: self._ready(tree),
            whole=self._let_outlive,
        )

    def _is_given_up(self) -> bool:
        """Main does not want it any more, or is gone; asked while there is a wait that can be ended."""
        try:
            stop_if_aborted(self._main)
        except Aborted:
            return True
        return False

    def _ready(self, tree: TreeOrder) -> None:
        self._clock.end("host_to_gpu")
        self._await_go(tree)

    def _report(self, tree: TreeOrder) -> None:
        self._huge_pages.end()
        self._tell(
            "restored",
            tree=to_json(tree),
            seconds=self._clock.seconds,
            cgroup=procfs.cgroup_of(tree.root.pid),
            notes=self._huge_pages.notes,
            inside=numbers_inside(tree, self._order.tree, self._enclosure),
        )
        if self._order.wait:
            self._stay_parent(tree.root)

    def _stay_parent(self, root: ProcessId) -> None:
        """Be the restored root's parent until it ends, or until main has gone; pass signals on."""
        own_init = self._enclosure.init if self._enclosure is not None else None
        while True:
            # Process 1 of a pid namespace ends with the root, and as it did.
            ended, status = os.waitpid((own_init or root).pid, os.WNOHANG)
            if ended:
                self._tell("exited", status=os.waitstatus_to_exitcode(status))
                return
            try:
                message = self._main.receive(WAIT_STEP_SECONDS)
            except PeerGone:
                self._stand_in(root)
                return
            if message is not None and message["say"] == "signal":
                procfs.send(root, message["number"])

    def _stand_in(self, root: ProcessId) -> None:
        """Main was killed. The job outlives it: without a terminal init becomes its parent, else we keep it open."""
        if self._order.master is None:
            return
        while os.waitpid(root.pid, os.WNOHANG) == (0, 0):
            terminal.discard(self._order.master, WAIT_STEP_SECONDS)

    def _fail(self, message: str, hint: str = "", line: str = "", *, broken_off: bool = False) -> None:
        """End what was built, then say what happened; `broken_off`: because main, or the deadline, wanted it so."""
        if self._hold is not None:
            for identity in find(self._order.tree, self._enclosure).values():
                self._kill_held(identity.pid)
            self._hold.let_go()
        if self._run is not None:
            status = self._run.turn_away(END_SECONDS if self._gate.has_caller else ASTRAY_SECONDS)
            if status is None or status < 0:
                remove_network_lock(criu_log.run_id(self._run.log_text()))
        left = self._end_half_built()
        if self._cgroup is not None:
            self._cgroup.kill()
            self._cgroup.remove()
        self._means.journal.write("ended-half-built", left=left)
        self._huge_pages.end()
        log, notes = str(self._paths.log), self._huge_pages.notes
        self._tell(
            "failed", message=message, hint=hint, line=line, log=log, left=left, notes=notes, broken_off=broken_off
        )

    def _end_half_built(self) -> list[int]:
        if self._enclosure is not None and self._enclosure.has_own_pids:
            return self._enclosure.end()
        pids = [identity.pid for identity in self._order.tree.ids]
        return end_half_built(self._paths.log, pids, born_after=_own_start_ticks())

    def _kill_held(self, pid: int) -> None:
        """End a process of the held tree before its threads are let go: not one instruction may run."""
        now = procfs.process_id(pid)
        if now is not None and self._hold is not None and self._hold.tids & set(procfs.threads(pid)):
            procfs.send(now, signal.SIGKILL)

    def _tell(self, say: str, **content: object) -> None:
        try:
            self._main.send(say, **content)
        except PeerGone:
            return


def _keyed(by_pid: Mapping[int, int]) -> dict[str, int]:
    """As JSON can have it."""
    return {str(pid): value for pid, value in by_pid.items()}


def _threads_of(tree: TreeOrder) -> list[int]:
    """Every thread of the tree's living processes: a zombie has none that could be held."""
    living = [identity.pid for identity in tree.ids if procfs.state(identity) not in procfs.ENDED]
    return [tid for pid in living for tid in procfs.threads(pid)]


def _own_start_ticks() -> int:
    identity = procfs.process_id(os.getpid())
    assert identity is not None  # noqa: S101 - we live
    return identity.start_ticks


def restore(order: RestoreOrder, main: Channel, means: Means) -> None:
    """Carry out a restore order."""
    work = RestoreWork(order, main, means)
    try:
        work.perform()
    finally:
        work.close()

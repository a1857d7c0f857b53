"""The owner's part of a dump.

steps, and what a crash of the owner at each leaves (main, or a later `restore --tree`, puts it right):

1. lock, hold, checkpoint, stop   CUDA locked or checkpointed, tree running or stopped: resumed by looking
2. criu dump, up to the gate      CRIU finds nobody at the gate, undoes everything: as after 1
3. wait for main at the gate      as 2; main publishes the image meanwhile
4. journal `committed`, commit    the image is good: CRIU ends the tree, or the repair finishes the ending.
                                  A tree that CRIU has let go meanwhile has run on past its image: it goes on
   (--leave-running: commit, resume; a crash leaves the tree stopped as after 1)
A migration gives the tree away between 3 and 4: what that changes stands in owner/giving.py.
"""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from gpuckpt.model.jsonform import to_json
from gpuckpt.owner.criurun import (
    SILENCE_SECONDS,
    Aborted,
    CriuFailure,
    CriuRun,
    Expired,
    MainSilent,
    stop_if_aborted,
)
from gpuckpt.owner.gate import Gate
from gpuckpt.owner.giving import Held, await_stopped, continue_all, lock_stays, stop_all
from gpuckpt.owner.hostchanges import HugePages
from gpuckpt.owner.messages import Channel, PeerGone
from gpuckpt.owner.suspension import SuspendFailed, checkpoint_all, lock_all
from gpuckpt.owner.unwind import (
    Means,
    Unwound,
    doubted,
    end_all,
    has_gone_on,
    look,
    remove_network_lock,
    unwind,
    with_newcomers,
)
from gpuckpt.system import criu, criu_log, procfs
from gpuckpt.system.files import placed_from

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gpuckpt.model.facts import ProcessId
    from gpuckpt.owner.messages import DumpOrder

END_SECONDS = 90.0
"""How long CRIU may take to let go of the tree, or to end it. Longer than its own limit for freezing it."""

GONE_SECONDS = 10.0
REAP_SECONDS = 0.1
"""A parent that waits for its child needs less. The init of a container may take seconds: a restore waits for it."""
OF_INIT = "zombie of 1 "
"""It reaps what it is given, sooner or later: nothing to tell."""
STEP_SECONDS = 0.2


@dataclass
class Clock:
    """Seconds by phase, and since when the job has stood still."""

    seconds: dict[str, float] = field(default_factory=dict)
    frozen_since: float | None = None
    stopped_since: float | None = None
    _mark: float = 0.0

    def begin(self) -> None:
        """A phase begins now."""
        self._mark = time.monotonic()

    def end(self, phase: str) -> None:
        """The phase ends now."""
        self.seconds[phase] = time.monotonic() - self._mark


class DumpWork:
    """One dump order at work."""

    def __init__(self, order: DumpOrder, main: Channel, means: Means) -> None:
        self._order = order
        self._everyone = order.tree
        """With processes that were born before the freeze."""
        self._main = main
        self._means = means
        self._clock = Clock()
        directory = Path(order.run_directory)
        self._gate = Gate(directory)
        plugins = directory / "plugins"
        plugins.mkdir()
        self._paths = criu.WorkPaths(Path(order.images), directory, plugins, self._gate.script)
        self._run: CriuRun | None = None
        self._huge_pages = HugePages(directory, wanted=order.huge_pages and means.suspender is not None)
        self._copies: dict[int, list[tuple[int, int]]] = {}
        """Where the driver's copies of GPU memory lie, by pid."""
        self._litter: list[object] = []
        """Files that CRIU leaves when it has ended the tree (system/files.py, Placed)."""
        self._given = self._runs_there = False
        """A migration's tree: see owner/giving.py."""

    def close(self) -> None:
        """Remove what lies outside the run directory."""
        self._gate.close()
        self._gate.script.unlink(missing_ok=True)
        if self._run is not None:
            self._run.close()

    def perform(self) -> None:
        """Do it all, and tell main how it ended. Whatever fails, the tree is brought back first."""
        try:
            self._suspend()
            self._capture()
            self._await_commit()
        except Held:
            self._hold()
        except SuspendFailed as error:
            self._fail(error.message, error.hint)
        except CriuFailure as failure:
            self._fail(failure.cause, failure.remedy, line=failure.line)
        except Expired:
            self._fail("the deadline (--timeout) passed", "give it more time")
        except MainSilent:
            self._end_main()
            self._fail("gpuckpt's main process stood still")
        except (Aborted, PeerGone):
            self._fail("the dump was broken off")
        except OSError as error:
            where = f" ({error.filename})" if error.filename else ""
            self._fail(f"the dump could not be carried out: {error.strerror}{where}", "look at /run and at CRIU")
        else:
            self._commit()

    def _suspend(self) -> None:
        if self._means.suspender is None:
            return
        self._huge_pages.begin()
        self._clock.frozen_since = time.monotonic()
        self._clock.begin()
        self._main.send("phase", phase="lock")
        lock_all(self._order.tree, self._means.suspender, self._order.lock_timeout_ms, self._means.journal)
        self._clock.end("lock")
        stop_if_aborted(self._main)
        self._clock.begin()
        self._main.send("phase", phase="gpu_to_host")
        self._clock.stopped_since = time.monotonic()
        self._copies = checkpoint_all(
            self._order.tree, self._means.suspender, self._means.journal, self._means.deadline
        )
        self._clock.end("gpu_to_host")
        stop_if_aborted(self._main)
        if not self._order.leave_running:
            self._huge_pages.end()  # no resume will come

    def _capture(self) -> None:
        now = time.monotonic()
        self._clock.frozen_since = self._clock.frozen_since or now
        self._clock.stopped_since = self._clock.stopped_since or now
        self._clock.begin()
        self._main.send("phase", phase="capture")
        order = self._order
        argv = criu.dump_argv(
            order.criu,
            order.tree.root.pid,
            self._paths,
            order.options,
            leave_running=order.leave_running,
            stream=order.stream,
        )
        self._run = CriuRun(argv, self._paths, self._gate, self._means.journal, shielded=True)
        if order.leave_running and order.tree.cuda:
            self._means.get_ready()
        self._run.await_gate(self._main, self._means.deadline)
        self._clock.end("capture")
        self._everyone = with_newcomers(self._order.tree)
        self._means.journal.write("at-gate")
        self._main.send(
            "captured",
            seconds=self._clock.seconds,
            frozen_since=self._clock.frozen_since,
            run_id=criu_log.run_id(self._run.log_text()),
            log=str(self._paths.log),
            pids=[identity.pid for identity in procfs.tree_ids(order.tree.root)],
            copies={str(pid): ranges for pid, ranges in self._copies.items()},
        )

    def _await_commit(self) -> None:
        """Main captures files and, where the tree shall end, publishes; then it says commit."""
        assert self._run is not None  # noqa: S101 - set by _capture
        began = time.monotonic()
        while True:
            message = self._main.receive(STEP_SECONDS)
            if self._main.silent_seconds(began) > SILENCE_SECONDS:
                raise MainSilent  # the job must not stand with it
            if message is not None and message["say"] == "commit":
                self._litter = message.get("litter", [])
                return
            if message is not None and message["say"] == "give":
                self._give(message["to"])
                return
            if message is not None and message["say"] == "abort":
                raise Aborted
            if self._run.await_end(0) is not None:
                raise self._run.failure()  # CRIU was killed at the gate: the tree has gone on
            if self._means.deadline is not None and time.monotonic() > self._means.deadline:
                raise Expired

    def _give(self, to: str) -> None:
        """Main is about to let the copy on another host run. Raises Held, Aborted, CriuFailure."""
        assert self._run is not None  # noqa: S101 - set by _capture
        stop_all(self._everyone)
        if self._run.await_end(0) is not None:
            continue_all(self._everyone)
            raise self._run.failure()  # the tree went on before it was stopped, and nothing was given yet
        self._means.journal.write("given", to=to)
        self._given = True
        try:
            self._main.send("given")
            self._await_news()
        except PeerGone:
            if not self._runs_there:
                raise Held from None

    def _await_news(self) -> None:
        """Whether the copy runs, as main hears it. Raises Held, Aborted, PeerGone."""
        began = time.monotonic()
        while True:
            message = self._main.receive(STEP_SECONDS)
            word = message["say"] if message is not None else ""
            if word == "runs-there":
                self._means.journal.write("runs-there")
                self._runs_there = True
            elif word == "commit":
                self._litter = message.get("litter", []) if message is not None else []
                return
            elif word == "abort":
                self._means.journal.write("taken-back")
                continue_all(self._everyone)
                raise Aborted
            elif word == "hold":
                raise Held
            elif self._main.silent_seconds(began) > SILENCE_SECONDS:
                raise PeerGone  # somebody stopped it: what it said last counts

    def _hold(self) -> None:
        """Let CRIU go away; the tree comes out of its hands stopped, connections and all."""
        assert self._run is not None  # noqa: S101 - only a captured tree is given away
        self._means.journal.write("held")
        status = self._run.turn_away(END_SECONDS)
        if status is None or status < 0:
            self._remove_network_lock()
        stop_all(self._everyone)
        await_stopped(self._everyone)
        self._huge_pages.end()
        self._tell("held", seen=to_json(look(self._everyone, None)), notes=self._huge_pages.notes)

    def _commit(self) -> None:
        self._means.journal.write("committed", leave_running=self._order.leave_running, litter=self._litter)
        assert self._run is not None  # noqa: S101 - set by _capture
        passed = self._gate.commit()
        status = self._run.await_end(END_SECONDS)
        if status is None:
            self._run.kill()
        if self._order.leave_running:
            self._resume(ok=passed and status == 0)
        else:
            self._finish_ending(ok=passed and status == 0)

    def _resume(self, *, ok: bool) -> None:
        """The image is captured and the job goes on."""
        self._clock.begin()
        if not ok:
            self._remove_network_lock()
        unwound = self._unwind()
        self._clock.end("resume")
        if not ok:
            failure = self._failure()
            self._report_failure(failure.cause, failure.remedy, failure.line, unwound)
            return
        self._report("resumed", unwound)

    def _unwind(self) -> Unwound:
        unwound = unwind(self._order.tree, self._means, criu_died=self._criu_died())
        return doubted(unwound, self._order.tree)

    def _failure(self) -> CriuFailure:
        assert self._run is not None  # noqa: S101 - set by _capture
        return self._run.failure()

    def _finish_ending(self, *, ok: bool) -> None:
        """The image is published: the tree ends, by CRIU or, where CRIU died in the middle of it, by us."""
        if not ok:
            self._remove_network_lock()
            if not self._given and has_gone_on(self._order.tree, criu_died=self._criu_died()):
                # Its script or CRIU was killed at the gate: to end it now would lose what it has done since.
                failure = self._failure()
                self._fail(failure.cause, failure.remedy, failure.line)
                return
            end_all(self._everyone)
        now = time.monotonic()
        for one in placed_from(self._litter):  # at once: an unreaped process can keep us for long
            one.remove()
        left = _await_gone(self._everyone.ids)
        if ok and not self._lock_stays():
            # CRIU leaves it for a restore here; behind it even the inner connections of that restore are dead.
            self._remove_network_lock()
        self._tell(
            "ended",
            seconds=self._clock.seconds,
            frozen_seconds=now - (self._clock.frozen_since or now),
            stopped_seconds=now - (self._clock.stopped_since or now),
            not_reaped=[f"{identity.pid}: {why}" for identity, why in left if not why.startswith(OF_INIT)],
            notes=self._huge_pages.notes,
        )

    def _end_main(self) -> None:
        """A stopped main holds the far end of CRIU's pipes: CRIU, and the job with it, would wait for it for ever.

        Only its end closes them. CRIU itself must not be killed: its code still lies in the job's processes.
        """
        main = procfs.process_id(os.getppid())
        if self._order.stream and main is not None and procfs.state(main) in ("T", "t"):
            procfs.send(main, signal.SIGKILL)

    def _fail(self, message: str, hint: str = "", line: str = "") -> None:
        """Bring the tree back, then say what happened."""
        if self._run is not None:
            self._tell("giving-up")  # main closes its pipes: CRIU may be waiting for a disk that does not answer
            status = self._run.turn_away(END_SECONDS)
            if status is None or status < 0:
                self._remove_network_lock()
        self._clock.begin()
        unwound = self._unwind()
        self._clock.end("resume")
        self._report_failure(message, hint, line, unwound)

    def _criu_died(self) -> bool:
        """CRIU was killed, or crashed: it could not take its code out of the tree's processes."""
        status = self._run.await_end(0) if self._run is not None else 0
        return status is None or status < 0

    def _report_failure(self, message: str, hint: str, line: str, unwound: Unwound) -> None:
        self._tell("failed", message=message, hint=hint, line=line, log=str(self._paths.log), **self._outcome(unwound))

    def _report(self, say: str, unwound: Unwound) -> None:
        now = time.monotonic()
        self._tell(
            say,
            seconds=self._clock.seconds,
            frozen_seconds=now - (self._clock.frozen_since or now),
            stopped_seconds=now - (self._clock.stopped_since or now),
            **self._outcome(unwound),
        )

    def _outcome(self, unwound: Unwound) -> dict[str, object]:
        """The tree is as it will be: what was seen of it, and the host as it was before."""
        self._means.journal.write("unwound", state=unwound.state, problem=unwound.problem)
        self._huge_pages.end()
        seen = to_json(unwound.seen)
        return {"state": unwound.state, "problem": unwound.problem, "seen": seen, "notes": self._huge_pages.notes}

    def _lock_stays(self) -> bool:
        order = self._order
        return order.keep_network_lock and (not self._given or lock_stays(order.kept_addresses))

    def _remove_network_lock(self) -> None:
        assert self._run is not None  # noqa: S101 - there was a CRIU
        remove_network_lock(criu_log.run_id(self._run.log_text()))

    def _tell(self, say: str, **content: object) -> None:
        """Main may be gone: then nobody is left to tell, and the journal has it."""
        try:
            self._main.send(say, **content)
        except PeerGone:
            return


def _await_gone(ids: Sequence[ProcessId]) -> list[tuple[ProcessId, str]]:
    """Wait until all have ended, and whether their pids get free at once; returns who is left and why."""
    living = procfs.wait_ended(ids, GONE_SECONDS)
    return procfs.wait_gone(ids, 0.0 if living else REAP_SECONDS)


def dump(order: DumpOrder, main: Channel, means: Means) -> None:
    """Carry out a dump order."""
    work = DumpWork(order, main, means)
    try:
        work.perform()
    finally:
        work.close()

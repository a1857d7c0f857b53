"""Repair: a second owner looks at a tree that an interrupted run may have left held.

What is right depends on how far the run's journal says it came:

dump, not committed        the tree goes on (unwind by looking)
dump, committed            the image is good: the ending is finished (with --leave-running: the tree goes on)
restore, not let go        the half-built tree ends
restore, let go            nothing
no journal                 the tree goes on
"""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Literal

from gpuckpt.model.facts import ProcessId
from gpuckpt.model.jsonform import to_json
from gpuckpt.owner import journal as journals
from gpuckpt.owner.messages import Channel, DumpOrder, RepairOrder, RestoreOrder, order_from_json
from gpuckpt.owner.restoring import end_half_built
from gpuckpt.owner.unwind import Means, look, remove_network_lock, unwind
from gpuckpt.system import criu_log, procfs

CRIU_SECONDS = 30.0
"""How long an orphaned CRIU may take to notice that nobody is at its gate, and to undo its work."""

Duty = Literal["resume", "finish-ending", "end-half-built", "nothing"]


def duty(past: journals.PastRun) -> Duty:
    """What a survivor must do after a run with this journal."""
    started = past.last("order")
    kind = started["kind"] if started else "repair"
    if kind == "dump":
        committed = past.last("committed")
        return "finish-ending" if committed and not committed.get("leave_running") else "resume"
    if kind == "restore":
        return "nothing" if past.has("let-go") or not past.has("criu") else "end-half-built"
    return "resume"


def repair(order: RepairOrder, main: Channel, means: Means) -> None:
    """Carry out a repair order and report what was seen afterwards."""
    past = journals.read(Path(order.left_behind)) if order.left_behind else journals.PastRun([])
    what = duty(past)
    means.journal.write("repair", duty=what)
    _await_orphaned_criu(past)
    if order.left_behind:
        _remove_lock_of(Path(order.left_behind))
    if what == "resume":
        unwound = unwind(order.tree, means)
        main.send("repaired", duty=what, state=unwound.state, problem=unwound.problem, seen=to_json(unwound.seen))
        return
    if what == "finish-ending":
        for identity in order.tree.ids:
            procfs.send(identity, signal.SIGKILL)
        procfs.wait_gone(order.tree.ids, CRIU_SECONDS)
    if what == "end-half-built":
        end_half_built(order.tree.ids, born_after=_run_began(past))
    seen = look(order.tree, means.suspender)
    states = {one.state for one in seen}
    state = "frozen" if "frozen" in states else "running" if "running" in states else "gone"
    main.send("repaired", duty=what, state=state, problem="", seen=to_json(seen))


def _run_began(past: journals.PastRun) -> int:
    line = past.last("owner-started")
    return int(line["start_ticks"]) if line else 0


def _await_orphaned_criu(past: journals.PastRun) -> None:
    """An orphaned CRIU undoes its work by itself when nobody is at the gate; one that hangs is killed."""
    line = past.last("criu-started")
    if line is None:
        return
    identity = ProcessId(int(line["pid"]), int(line["start_ticks"]))
    deadline = time.monotonic() + CRIU_SECONDS
    while procfs.state(identity) not in (None, "Z"):
        if time.monotonic() > deadline:
            procfs.send(identity, signal.SIGKILL)
        time.sleep(0.02)
        if time.monotonic() > deadline + 5:
            return


def _remove_lock_of(run_directory: Path) -> None:
    try:
        log = (run_directory / "criu.log").read_text("utf-8", "replace")
    except OSError:
        return
    remove_network_lock(criu_log.run_id(log))


def order_of(past: journals.PastRun) -> DumpOrder | RestoreOrder | None:
    """The order that a past run was given, as far as its journal has it."""
    line = past.last("order")
    if line is None:
        return None
    try:
        order = order_from_json(line)
    except (ValueError, KeyError):
        return None
    return order if isinstance(order, (DumpOrder, RestoreOrder)) else None

"""Repair: a second owner looks at a tree that an interrupted run may have left held.

What is right depends on how far the run's journal says it came:

dump, not committed        the tree goes on (unwind by looking)
dump, committed            the image is good: the ending is finished. But a tree that runs again has run on past
                           its image, perhaps for hours: it goes on (with --leave-running it does anyway)
dump, given away           owner/giving.py; where the journal cannot know, the order says it
restore, not let go        the half-built tree ends (also where CRIU died before it had let all of it go)
restore, let go            nothing
no journal                 the tree goes on
"""

from __future__ import annotations

import signal
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Literal

from gpuckpt.model.facts import ProcessId
from gpuckpt.model.jsonform import to_json
from gpuckpt.owner import hostchanges
from gpuckpt.owner import journal as journals
from gpuckpt.owner.criurun import choke
from gpuckpt.owner.giving import await_stopped, continue_all, stop_all
from gpuckpt.owner.halfbuilt import (
    came_alive,
    end_half_built,
    end_namespace,
    init_of,
    is_enclosed,
    own_processes,
)
from gpuckpt.owner.messages import Channel, DumpOrder, Given, RepairOrder, RestoreOrder, TreeOrder, order_from_json
from gpuckpt.owner.runs import CRIU_LOG, began
from gpuckpt.owner.unwind import Means, doubted, end_all, has_gone_on, look, remove_network_lock, unwind
from gpuckpt.system import criu_log, procfs

GONE_SECONDS = 10.0
CRIU_SECONDS = 90.0
"""How long an orphaned CRIU may take to notice that nobody is at its gate, and to undo its work."""

KILLED_SECONDS = 5.0
VERDICTS = ("FAILED", "finished successfully")
"""One of these stands in the log of every CRIU that ended by itself."""

Duty = Literal["resume", "finish-ending", "hold", "end-half-built", "nothing"]


def duty(past: journals.PastRun, log: Path) -> Duty:
    """What a survivor must do after a run with this journal and this CRIU log."""
    started = past.last("order")
    kind = started["kind"] if started else "repair"
    if kind == "dump":
        committed = past.last("committed")
        if committed is not None:
            return "resume" if committed.get("leave_running") else "finish-ending"
        return _duty_of_given(past) if past.has("given") else "resume"
    if kind == "restore":
        whole = past.has("let-go") and came_alive(log)
        return "nothing" if whole or not past.has("criu") else "end-half-built"
    return "resume"


def _duty_of_given(past: journals.PastRun) -> Duty:
    """See owner/giving.py."""
    if past.has("taken-back"):
        return "resume"
    return "finish-ending" if past.has("runs-there") and not past.has("held") else "hold"


_BY_ORDER: dict[Given, Duty] = {"resume": "resume", "hold": "hold", "end": "finish-ending"}


def repair(order: RepairOrder, main: Channel, means: Means) -> None:
    """Carry out a repair order and report what was seen afterwards."""
    left_behind = Path(order.left_behind) if order.left_behind else None
    past = journals.read(left_behind) if left_behind else journals.PastRun([])
    log = (left_behind or Path(order.run_directory)) / CRIU_LOG
    died = await_orphaned_criu(past, log)
    what = duty(past, log)
    if is_enclosed(past):
        _repair_enclosed(order, main, means, past, what)
        return
    given = past.has("given")
    if given and what == "hold":
        what = _BY_ORDER[order.given]
    elif what == "finish-ending" and not given and has_gone_on(order.tree, criu_died=died):
        what = "resume"
    means.journal.write("repair", duty=what)
    _remove_lock_of(log)
    if what == "resume":
        if given:
            continue_all(order.tree)
        unwound = unwind(order.tree, means, criu_died=died)
        if left_behind is not None and _in_the_same_run(order, left_behind):
            unwound = doubted(unwound, order.tree)
        notes = _put_host_back(left_behind)
        seen = to_json(unwound.seen)
        main.send("repaired", duty=what, state=unwound.state, problem=unwound.problem, seen=seen, notes=notes)
        return
    if what == "hold":
        stop_all(order.tree)
        await_stopped(order.tree)
        seen = to_json(look(order.tree, None))
        main.send("repaired", duty=what, state="frozen", problem="", seen=seen, notes=_put_host_back(left_behind))
        return
    if what == "finish-ending":
        end_all(order.tree)
        procfs.wait_gone(order.tree.ids, GONE_SECONDS)
        tree = order.tree
    else:
        pids = [identity.pid for identity in order.tree.ids]
        if what == "end-half-built":
            end_half_built(log, pids, born_after=began(past), long_ago=True)
        tree = _restored(order.tree, own_processes(log, pids, born_after=began(past), long_ago=True))
    seen = look(tree, means.suspender)
    states = {one.state for one in seen}
    state = "frozen" if "frozen" in states else "running" if "running" in states else "gone"
    notes = _put_host_back(left_behind)
    main.send("repaired", duty=what, state=state, problem="", seen=to_json(seen), ids=to_json(tree.ids), notes=notes)


def _repair_enclosed(order: RepairOrder, main: Channel, means: Means, past: journals.PastRun, what: Duty) -> None:
    """A tree in a pid namespace: it ends with its process 1, and is known by the pids it has here."""
    init = init_of(past)
    means.journal.write("repair", duty=what)
    left = end_namespace(init) if init is not None and what == "end-half-built" else []
    members = procfs.inside(init) if init is not None and procfs.is_same(init) else {}
    here = [members[one.pid] for one in order.tree.ids if one.pid in members]
    tree = _restored(order.tree, here, members)
    seen = look(tree, means.suspender)
    state = "frozen" if left or any(one.state == "frozen" for one in seen) else "running" if here else "gone"
    notes = _put_host_back(Path(order.left_behind) if order.left_behind else None)
    main.send("repaired", duty=what, state=state, problem="", seen=to_json(seen), ids=to_json(tree.ids), notes=notes)


def _in_the_same_run(order: RepairOrder, left_behind: Path) -> bool:
    """Main repairs what its own owner left, at once: nobody was told yet. A repair's directory lies in its run's."""
    return Path(order.run_directory).parent == left_behind


def _put_host_back(left_behind: Path | None) -> list[str]:
    """The host settings of the interrupted run (its lock may be main's still), and of any other that was killed."""
    own = hostchanges.put_back(left_behind) if left_behind is not None else []
    return own + hostchanges.put_back_dead()


def _restored(tree: TreeOrder, fresh: list[ProcessId], numbers: Mapping[int, ProcessId] | None = None) -> TreeOrder:
    """The tree of a restore as it lives now: `numbers` are the dump's pids, where those of this host are others."""
    now = {identity.pid: identity for identity in fresh} if numbers is None else numbers
    gone = ProcessId(tree.root.pid, 0)
    return TreeOrder(
        root=now.get(tree.root.pid, gone),
        ids=tuple(fresh) or (gone,),
        stopped=tuple(now[one.pid] for one in tree.stopped if one.pid in now),
        cuda=tuple(replace(member, id=now[member.id.pid]) for member in tree.cuda if member.id.pid in now),
    )


def await_orphaned_criu(past: journals.PastRun, log: Path) -> bool:
    """Wait until the CRIU of an owner that was killed has undone its work; one that hangs is killed.

    Nobody is at its gate, so it gives up there by itself; a dump's is made to do so before that. Returns
    whether it died in the middle instead, by whatever hand.
    """
    line = past.last("criu-started")
    if line is None:
        return False
    identity = ProcessId(int(line["pid"]), int(line["start_ticks"]))
    order = past.last("order")
    choked = (
        order is not None
        and order["kind"] == "dump"
        and not past.has("at-gate")
        and procfs.state(identity) not in procfs.ENDED
    )
    if choked:
        choke(identity.pid)
    deadline = time.monotonic() + CRIU_SECONDS
    while procfs.state(identity) not in procfs.ENDED and time.monotonic() < deadline + KILLED_SECONDS:
        if time.monotonic() > deadline:
            procfs.send(identity, signal.SIGKILL)
        time.sleep(0.02)
    # It opens its log before it looks at any process: without one it never came to the tree.
    return not choked and log.exists() and not _has_verdict(log)


def _has_verdict(log: Path) -> bool:
    """Whether CRIU came to an end of its own; a choked one cannot write that down."""
    try:
        text = log.read_text("utf-8", "replace")
    except OSError:
        return False
    return any(word in text for word in VERDICTS)


def _remove_lock_of(log: Path) -> None:
    try:
        text = log.read_text("utf-8", "replace")
    except OSError:
        return
    remove_network_lock(criu_log.run_id(text))


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

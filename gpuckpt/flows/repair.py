"""restore --tree: repair a tree that an interrupted run left held, and what the next run repairs by itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gpuckpt.flows import gather, spool
from gpuckpt.flows.conversation import repair_with_second_owner, seen_of, words_for_seen
from gpuckpt.model.errors import NotFound, TreeHeld
from gpuckpt.model.facts import ProcessId
from gpuckpt.model.jsonform import to_json
from gpuckpt.model.report import Event, Report
from gpuckpt.owner import hostchanges, journal, repairing, runs
from gpuckpt.owner.messages import CudaMember, TreeOrder
from gpuckpt.system import procfs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gpuckpt.flows.machine import Machine
    from gpuckpt.model.facts import Tree
    from gpuckpt.model.requests import RepairRequest


def repair(request: RepairRequest, machine: Machine) -> Report:
    """Look at the tree, do what is right for what is seen, and report it process by process."""
    notes: list[str] = []
    leftover = _leftover_of(request.pid, teller(machine, notes))
    tree = _tree_order(request.pid, leftover, machine, force_program=request.force_program)
    data: dict[str, object] = {"root_pid": tree.root.pid, "pids": [one.pid for one in tree.ids]}
    if leftover is not None:
        data |= {"interrupted": leftover.operation, "since": leftover.since}
    if request.dry_run:
        return Report("restore", "planned", "untouched", data)
    well = leftover is None and _is_well(tree, force_program=request.force_program)
    said = _carry_out(tree, leftover, machine, notes, force_program=request.force_program)
    if said is None:
        raise TreeHeld("the repair was cut off: the process that did it was killed", "repeat the command")
    seen = seen_of(said)
    if said["state"] == "frozen":
        raise TreeHeld(f"the tree does not run: {said['problem'] or words_for_seen(seen)}", "repeat the command later")
    data |= {"duty": "nothing" if well else said["duty"], "seen": to_json(seen), "notes": notes + said.get("notes", [])}
    if said["state"] == "gone" and said["duty"] == "resume":
        raise NotFound(f"the tree of {tree.root.pid} has ended", "restore its newest image", process="ended")
    return Report("restore", "ok", "running" if said["state"] == "running" else "ended", data)


def teller(machine: Machine, notes: list[str]) -> runs.Tell:
    """Tells what was found when ended runs were settled: at once, and in these notes of the report."""

    def tell(note: str) -> None:
        machine.listener(Event("host", "note", note))
        notes.append(note)

    return tell


def put_host_back(machine: Machine) -> list[str]:
    """Put back host settings that runs that were killed have left changed, and remove what else they have left.

    Returns notes, told at once.
    """
    spool.remove_dead()
    runs.let_packets_through()
    notes = hostchanges.put_back_dead()
    for note in notes:
        machine.listener(Event("host", "note", note))
    return notes


def clear_before_dump(tree: Tree, machine: Machine, *, force_program: bool) -> list[str]:
    """An interrupted dump whose tree is seen running must not stand in the way of the next one for ever.

    What is seen held stays as it is: `runs.begin` then refuses and names the repair. Returns notes.
    """
    notes: list[str] = []
    for leftover in runs.leftovers_of(tree.ids, teller(machine, notes)):
        if leftover.operation != "restore" and _runs_as_before(tree, leftover):
            # All the same through the repair: a CRIU that was killed leaves the tree's connections locked.
            said = _carry_out(_order_of(leftover), leftover, machine, notes, force_program=force_program)
            if said is not None and said["state"] == "running":
                notes.append(f"cleared what an interrupted {leftover.operation} of this tree had left")
    return notes


def clear_before_restore(ids: Sequence[ProcessId], machine: Machine, *, force_program: bool) -> list[str]:
    """End what an interrupted restore of these pids built by half: it never ran, and it holds them. Returns notes."""
    runs.refuse_busy(ids)
    notes: list[str] = []
    for leftover in runs.leftovers_of(ids, teller(machine, notes)):
        if leftover.operation == "restore":
            said = _carry_out(_order_of(leftover), leftover, machine, notes, force_program=force_program)
            if said is not None and said["state"] == "gone":
                notes.append("ended the half-built tree of an interrupted restore")
    return notes


def _leftover_of(pid: int, tell: runs.Tell) -> runs.Leftover | None:
    """What an interrupted run left of the process a user's pid means, by half or as a whole."""
    found = runs.leftovers_of([ProcessId(pid, 0)], tell)
    now = procfs.process_id(pid)
    return next((one for one in found if one.operation == "restore" or now in one.ids), None)


def _carry_out(
    tree: TreeOrder | None,
    leftover: runs.Leftover | None,
    machine: Machine,
    notes: list[str],
    *,
    force_program: bool,
) -> dict[str, Any] | None:
    """Let an owner repair; what the interrupted run left goes when it could be put right. Adds to the notes."""
    if tree is None:
        return None
    tell = teller(machine, notes)
    run = runs.begin("repair", tree.ids, repairs=leftover, tell=tell)
    try:
        left_behind = str(leftover.directory) if leftover else None
        said = repair_with_second_owner(run, tree, machine, left_behind=left_behind, force_program=force_program)
    finally:
        run.finish(keep=False)
    if leftover is not None and said is not None and said["state"] != "frozen":
        runs.settle(leftover.directory, tell)
    return said


def _is_well(tree: TreeOrder, *, force_program: bool) -> bool:
    """No process stands still that was not stopped before, and no CUDA is suspended."""
    if any(procfs.state(one) in ("T", "t") and one not in tree.stopped for one in tree.ids):
        return False
    cuda = gather.cuda_of([one.id for one in tree.cuda], force_program=force_program) if tree.cuda else ()
    return all(one.state == "running" for one in cuda)


def _runs_as_before(tree: Tree, leftover: runs.Leftover) -> bool:
    """Every process runs (or was stopped before), no CUDA is suspended, and the old CRIU is gone."""
    order = _order_of(leftover)
    if order is None or runs.criu_at_work(journal.read(leftover.directory)):
        return False
    held = [one.id for one in tree.processes if one.state in ("T", "t") and one.id not in order.stopped]
    return not held and all(one.state == "running" for one in tree.cuda)


def _order_of(leftover: runs.Leftover) -> TreeOrder | None:
    past = repairing.order_of(journal.read(leftover.directory))
    return past.tree if past is not None else None


def _tree_order(pid: int, leftover: runs.Leftover | None, machine: Machine, *, force_program: bool) -> TreeOrder:
    """The tree as the interrupted run knew it (stopped processes, GPU memory), else as it is now."""
    past = _order_of(leftover) if leftover else None
    if past is not None:
        return past
    root = gather.identify(pid)
    ids = tuple(procfs.tree_ids(root))
    cuda = gather.cuda_of(ids, force_program=force_program) if machine.accelerator() else ()
    # Without a journal nobody knows of a process that gpuckpt stopped: what is stopped, its user stopped.
    stopped = tuple(one for one in ids if procfs.state(one) == "T")
    return TreeOrder(root, ids, stopped, tuple(CudaMember(one.id, one.restore_tid) for one in cuda))

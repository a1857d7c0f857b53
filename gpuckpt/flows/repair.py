"""restore --tree: repair a tree that an interrupted run left held."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

from gpuckpt.flows import gather
from gpuckpt.flows.conversation import repair_with_second_owner, seen_of, words_for_seen
from gpuckpt.model.errors import NotFound, TreeHeld
from gpuckpt.model.jsonform import to_json
from gpuckpt.model.report import Report
from gpuckpt.owner import journal, repairing, runs
from gpuckpt.owner.messages import CudaMember, TreeOrder
from gpuckpt.system import procfs

if TYPE_CHECKING:
    from gpuckpt.flows.machine import Machine
    from gpuckpt.model.facts import ProcessId
    from gpuckpt.model.requests import RepairRequest


def repair(request: RepairRequest, machine: Machine) -> Report:
    """Look at the tree, do what is right for what is seen, and report it process by process."""
    root = gather.identify(request.pid)
    leftover = runs.leftover_of(root)
    tree = _tree_order(root, leftover, machine, force_program=request.force_program)
    data: dict[str, object] = {"root_pid": root.pid, "pids": [one.pid for one in tree.ids]}
    if leftover is not None:
        data |= {"interrupted": leftover.operation, "since": leftover.since}
    if request.dry_run:
        return Report("restore", "planned", "untouched", data)
    run = runs.begin("repair", tree.ids, repairs=leftover)
    try:
        said = repair_with_second_owner(
            run,
            tree,
            machine,
            left_behind=str(leftover.directory) if leftover else None,
            force_program=request.force_program,
        )
    finally:
        run.finish(keep=False)
    if said is None:
        raise TreeHeld("the repair was cut off: the process that did it was killed", "repeat the command")
    seen = seen_of(said)
    if said["state"] == "frozen":
        raise TreeHeld(f"the tree does not run: {said['problem'] or words_for_seen(seen)}", "repeat the command later")
    if leftover is not None:
        shutil.rmtree(leftover.directory, ignore_errors=True)
    data |= {"duty": said["duty"], "seen": to_json(seen)}
    if said["state"] == "gone" and said["duty"] == "resume":
        raise NotFound(f"the tree of {root.pid} has ended", "restore its newest image")
    return Report("restore", "ok", "running" if said["state"] == "running" else "ended", data)


def _tree_order(root: ProcessId, leftover: runs.Leftover | None, machine: Machine, *, force_program: bool) -> TreeOrder:
    """The tree as the interrupted run knew it (stopped processes, GPU memory), else as it is now."""
    past = repairing.order_of(journal.read(leftover.directory)) if leftover else None
    if past is not None and past.tree.root == root:
        return past.tree
    ids = tuple(procfs.tree_ids(root))
    cuda = gather.cuda_of(ids, force_program=force_program) if machine.accelerator() else ()
    return TreeOrder(root, ids, (), tuple(CudaMember(one.id, one.restore_tid) for one in cuda))

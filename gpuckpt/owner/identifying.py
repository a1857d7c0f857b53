"""Which processes of this host a restored tree is: in a pid namespace its pids there are those of the dump."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpuckpt.owner.messages import CudaMember, TreeOrder
from gpuckpt.owner.suspension import ResumeFailed
from gpuckpt.system import procfs

if TYPE_CHECKING:
    from gpuckpt.model.facts import ProcessId
    from gpuckpt.owner.enclosure import Enclosure


def find(tree: TreeOrder, enclosure: Enclosure | None) -> dict[int, ProcessId]:
    """The processes of the tree by their pids of the dump; those that are gone are missing."""
    if enclosure is not None and enclosure.has_own_pids:
        members = enclosure.members()
        return {one.pid: members[one.pid] for one in tree.ids if one.pid in members}
    return {one.pid: found for one in tree.ids if (found := procfs.process_id(one.pid))}


def identify(tree: TreeOrder, enclosure: Enclosure | None) -> TreeOrder:
    """The tree of an order as it is on this host, with the start times of now. Raises ResumeFailed."""
    fresh = find(tree, enclosure)
    if tree.root.pid not in fresh:
        raise ResumeFailed(f"process {tree.root.pid} ended at once")
    own_pids = enclosure is not None and enclosure.has_own_pids
    return TreeOrder(
        root=fresh[tree.root.pid],
        ids=tuple(fresh.values()),
        stopped=tuple(fresh[i.pid] for i in tree.stopped if i.pid in fresh),
        cuda=tuple(_cuda(member, fresh.get(member.id.pid), own_pids=own_pids) for member in tree.cuda),
    )


def _cuda(member: CudaMember, now: ProcessId | None, *, own_pids: bool) -> CudaMember:
    """A CUDA process as this host numbers it: the driver is asked by our pids and tids."""
    if now is None:
        raise ResumeFailed(f"process {member.id.pid} ended at once")
    tid = procfs.outer_tid(now, member.restore_tid) if own_pids else member.restore_tid
    if tid is None:
        raise ResumeFailed(f"process {now.pid} has lost the driver's restore thread")
    return CudaMember(now, tid, member.memory_bytes)


def numbers_inside(here: TreeOrder, dumped: TreeOrder, enclosure: Enclosure | None) -> dict[str, object]:
    """For main, of a tree in a pid namespace: process 1 as we see it, and the tree's pids in there, in its order."""
    if enclosure is None or enclosure.init is None:
        return {}
    numbers = {now: number for number, now in find(dumped, enclosure).items()}
    return {"init_pid": enclosure.init.pid, "namespace_pids": [numbers.get(one) for one in here.ids]}

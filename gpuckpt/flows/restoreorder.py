"""What a restore asks for: the directory that CRIU reads, and the order to the owner."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from gpuckpt import checks
from gpuckpt.flows import enclosing, injecting
from gpuckpt.flows.leandir import LeanDirectory, PackedMemory, Preparation
from gpuckpt.images import criuformat, ports, timers
from gpuckpt.owner.messages import CudaMember, RestoreOrder, TreeOrder

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from gpuckpt.checks import RestoreFacts
    from gpuckpt.flows.enclosing import Enclosing
    from gpuckpt.flows.imagesource import ImageSource
    from gpuckpt.flows.outsidestreams import OutsideStreams
    from gpuckpt.model.manifest import CriuOptions, Manifest
    from gpuckpt.model.report import Finding
    from gpuckpt.owner.runs import Run


def prepare(
    source: ImageSource,
    facts: RestoreFacts,
    run: Run,
    packed: PackedMemory | None,
    around: Enclosing,
    owner_pid: int,
    going_on: Callable[[], None],
) -> tuple[LeanDirectory, list[str]]:
    """Make the directory that CRIU reads, and decide what it shall not see; returns notes beside it.

    Raises ImageCorrupt, RestoreFailed, OSError, and what `going_on` raises.
    """
    plan, note = None, ""
    huge = injecting.worth_huge_pages(source.image.manifest)
    if packed is not None:
        criu = source.image.part("criu")
        plan, note = injecting.plan(packed, criu, owner_pid, huge, plain=facts.request.plain)
    lean = Preparation(
        source.image,
        run.directory,
        packed,
        plan,
        huge,
        facts.host.memory_available_bytes,
        lambda files_img: _for_this_restore(files_img, facts),
        going_on,
        around.show(enclosing.IMAGE, source.image.root),
        source.secret_place,
    ).make()
    return lean, [note] if note else []


def _for_this_restore(files_img: bytes, facts: RestoreFacts) -> bytes:
    """What CRIU shall find in files.img: timers that go on, and connections closed where that was decided."""
    edited = timers.rearm(files_img)
    if facts.tcp == "close":
        # CRIU's own --tcp-close would close the connections inside the tree as well.
        edited = criuformat.close_sockets(edited, {socket.inode for socket in criuformat.outside_sockets(files_img)})
    return ports.move(edited, facts.request.ports)


def order(
    manifest: Manifest,
    facts: RestoreFacts,
    findings: Sequence[Finding],
    run: Run,
    lean: LeanDirectory,
    around: Enclosing,
    streams: OutsideStreams,
    left_seconds: float | None,
    *,
    transaction: str,
) -> RestoreOrder:
    """The order of a restore; `transaction` is a migration's, else empty."""
    request = facts.request
    return RestoreOrder(
        run_directory=str(run.directory),
        tree=tree_order(manifest),
        criu=facts.host.criu.path or "",
        images=str(around.show(enclosing.LEAN, lean.path)),
        options=_options(manifest, findings),
        handed_over_stopped=manifest.handed_over_stopped,
        inherited=streams.inherited(request, manifest),
        gpu_map=checks.resolve_map(request.gpu_map, manifest.host.gpu.gpus, facts.host.gpu.gpus)[0],
        wait=request.wait,
        terminal=streams.relay.slave_path if streams.relay else None,
        master=streams.relay.master if streams.relay else None,
        cgroup_name=None if request.wait else f"{manifest.tree.root.pid}-{run.id}",
        deadline_seconds=left_seconds,
        force_program=request.force_program,
        lean=lean.plan is not None,
        fill=injecting.worth_filling(lean.plan, huge_pages=request.huge_pages),
        huge_pages=request.huge_pages,
        transaction=transaction,
        enclosed=around.order(),
        driver=facts.host.gpu,
    )


def tree_order(manifest: Manifest) -> TreeOrder:
    """The tree as it was at the dump."""
    members = tuple(CudaMember(one.id, one.restore_tid, one.gpu_memory_bytes) for one in manifest.cuda)
    return TreeOrder(manifest.tree.root, manifest.tree.ids, manifest.stopped, members)


def _options(manifest: Manifest, findings: Sequence[Finding]) -> CriuOptions:
    allowed = any(finding.id == "cpu-flags" and finding.allowed for finding in findings)
    return replace(manifest.criu, cpu_cap="none") if allowed else manifest.criu

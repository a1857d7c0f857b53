"""restore: image -> running tree.

steps, and what kill -9 of this process at each leaves (the owner's steps: owner/restoring.py):

1. open, verify every part, judge, plan   nothing was touched; what was fetched of an image on another host is
                                           removed by the next run, later by the owner. --pre-restore runs last
                                           in it (flows/hooks.py); packets of kept connections, dropped from before
                                           it on, pass again when the run is settled (owner/networklock.py)
2. lean directory, captured files          link-remap files, which the next restore uses; files that were put back,
                                           replaced or cut are as before once another run has found the journal of it
3. owner: CRIU up to the gate               the owner turns CRIU away: nothing is left of the tree
4. memory into the tree the owner holds     the owner ends the held tree: nothing is left of it
5. owner: CUDA restore, let go              the owner goes on by itself: a whole, running tree, or none
6. look at it, ready?, --post-restore       the tree runs
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from gpuckpt import checks
from gpuckpt.flows import (
    enclosing,
    gather,
    hooks,
    imagesource,
    openfiles,
    readiness,
    restoreorder,
    secretplace,
    settle,
    verifying,
)
from gpuckpt.flows import repair as repairing
from gpuckpt.flows.beside import Beside
from gpuckpt.flows.bringup import BringUp
from gpuckpt.flows.brokenoff import interrupted, nothing_touched
from gpuckpt.flows.conversation import REAP_SECONDS
from gpuckpt.flows.interruption import BrokenOff
from gpuckpt.flows.jobwait import JobWait
from gpuckpt.flows.leandir import PackedMemory, is_packed
from gpuckpt.flows.outsidestreams import OutsideStreams
from gpuckpt.flows.places import require_places
from gpuckpt.model.errors import GpuckptError, RestoredUnhealthy, RestoreFailed
from gpuckpt.model.jsonform import from_json
from gpuckpt.model.report import Event, Finding, Report
from gpuckpt.owner import networklock, runs
from gpuckpt.owner.handle import OwnerHandle, spare_owner
from gpuckpt.owner.messages import TreeOrder
from gpuckpt.system import procfs

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from gpuckpt.checks import RestoreFacts
    from gpuckpt.checks.facts import CapturedHere
    from gpuckpt.flows.bringup import Departure
    from gpuckpt.flows.imagesource import ImageSource
    from gpuckpt.flows.interruption import Interruption
    from gpuckpt.flows.machine import Machine
    from gpuckpt.flows.openfiles import FilesInPlace
    from gpuckpt.images.framesource import FrameSource
    from gpuckpt.images.packindex import Index
    from gpuckpt.model.facts import OpenFile, ProcessId
    from gpuckpt.model.manifest import Manifest
    from gpuckpt.model.requests import RestoreRequest
    from gpuckpt.owner.handle import SpareOwner
    from gpuckpt.owner.runs import Run
    from gpuckpt.stores.directory import Image


NO_CUDA = "--huge-pages did nothing: no process of the image uses CUDA"


def restore(
    request: RestoreRequest, machine: Machine, interruption: Interruption, departure: Departure | None = None
) -> Report:
    """Bring an image back. Raises GpuckptError with what became of it."""
    began = time.monotonic()
    require_places(request.stdio)
    needs_owner = departure is None and not request.dry_run and not request.wait
    with imagesource.opened(request, machine, interruption) as source, spare_owner(wanted=needs_owner) as spare:
        return _restore(source, machine, interruption, began, departure, spare)


def _restore(
    source: ImageSource,
    machine: Machine,
    interruption: Interruption,
    began: float,
    departure: Departure | None,
    spare: SpareOwner | None,
) -> Report:
    request, image = source.request, source.image
    machine.listener(Event("verify", "begin"))
    _untouched(lambda: source.verify(interruption))
    notes = source.notes if request.dry_run else _clear(request, image, machine)
    seen = openfiles.look(image)
    facts = gather.restore_facts(request, image.manifest, machine, _compare(image, interruption))
    judged = checks.judge(checks.RESTORE_CHECKS, facts, request.allow)
    findings = hooks.before_it(judged, "restore", request.hooks)
    refusal = checks.refusal(findings)
    plan = {
        **hooks.planned("restore", request.hooks),
        "image": request.name,
        "image_id": image.manifest.image_id,
        **enclosing.planned_pids(request, image.manifest),
        "files": [{"path": act.file.path, "act": act.kind} for act in checks.file_acts(facts)],
        "notes": notes,
    }
    if refusal:
        return Report("restore", "refused", "untouched", plan, findings, refusal)
    if request.dry_run:
        return Report("restore", "planned", "untouched", plan, findings)
    _untouched(lambda: source.complete(interruption))
    taken = enclosing.pids_taken(request, image.manifest)
    run = runs.begin("restore", taken, tell=repairing.teller(machine, notes))
    work = RestoreWork(
        *(source, machine, interruption, facts, findings, run, began, seen),
        notes=notes,
        departure=departure,
        spare=spare if departure is None else departure.spare,
    )
    try:
        # Before --pre-restore, which may bring their address here: without a socket it would be answered for. In
        # this network the connections of a tree that comes up in another one are those of the tree it was made of.
        kept = () if request.own_network else verifying.kept_connections(image, request)
        notes += networklock.hold_back(run.directory, kept)
        return work.still_there(work.hooked.carry_out(work.look_again, work.perform))
    finally:
        networklock.let_through(run.directory)
        run.finish(keep=work.something_is_left)


def _clear(request: RestoreRequest, image: Image, machine: Machine) -> list[str]:
    notes = [NO_CUDA] if request.huge_pages and not image.manifest.cuda else []
    notes += repairing.put_host_back(machine)
    taken = enclosing.pids_taken(request, image.manifest)
    return notes + repairing.clear_before_restore(taken, machine, force_program=request.force_program)


def _untouched(act: Callable[[], None]) -> None:
    """Something that can take long, before anything is touched."""
    try:
        act()
    except BrokenOff as trouble:
        raise nothing_touched(trouble) from None


def _compare(image: Image, interruption: Interruption) -> dict[str, CapturedHere]:
    try:
        return openfiles.compare(image, interruption.check)
    except BrokenOff as trouble:
        raise nothing_touched(trouble) from None


@dataclass
class RestoreWork:
    """One restore at work, after its checks have passed."""

    source: ImageSource
    machine: Machine
    interruption: Interruption
    facts: RestoreFacts
    findings: tuple[Finding, ...]
    run: Run
    began: float
    """On the monotonic clock, when the command began to work."""
    files_seen: Mapping[str, OpenFile | None]
    """Captured files here, from before they were compared."""
    hooked: hooks.Hooked = field(init=False)
    """The user's commands around it."""
    root: ProcessId | None = None
    """Of the tree that was let go and is not waited for."""
    streams: OutsideStreams = field(default_factory=OutsideStreams)
    files: FilesInPlace | None = None
    """What was put back or changed on this host."""
    files_now: list[str] = field(default_factory=list)
    """What a restore that fails must say of files: what stays changed, or could not be taken back."""
    notes: list[str] = field(default_factory=list)
    packed: PackedMemory | None = None
    departure: Departure | None = None
    spare: SpareOwner | None = None
    """An owner that is there already."""
    enclosing: enclosing.Enclosing = field(init=False)
    bring_up: BringUp | None = None
    """From the order to the owner on."""

    @property
    def request(self) -> RestoreRequest:
        """What the person asked for."""
        return self.source.request

    @property
    def image(self) -> Image:
        """The image, with its small files."""
        return self.source.image

    @property
    def manifest(self) -> Manifest:
        """The image's manifest."""
        return self.image.manifest

    @property
    def something_is_left(self) -> bool:
        """Of a tree that could not be ended: its run must not be forgotten."""
        return self.bring_up is not None and self.bring_up.something_is_left

    def __post_init__(self) -> None:
        root, request = self.manifest.tree.root.pid, self.request
        self.hooked = hooks.Hooked(
            *("restore", request.hooks, root, request.name, self.run, self.machine, self.interruption),
            broken_off=nothing_touched,
            image_id=self.manifest.image_id,
            clone_id=self.run.id if request.clone else "",
        )

    def look_again(self) -> None:
        """What the host is after --pre-restore. Raises what refuses then."""
        self.files_seen = openfiles.look(self.image)
        here = _compare(self.image, self.interruption)
        self.facts = gather.restore_facts(self.request, self.manifest, self.machine, here)
        self.findings = checks.judge(checks.RESTORE_CHECKS, self.facts, self.request.allow)
        refusal = checks.refusal(self.findings)
        if refusal is not None:
            refusal.findings = self.findings
            raise refusal

    def perform(self) -> Report:
        """Let the owner build the tree; what was put in place for it goes again when that fails."""
        try:
            return self._perform()
        except GpuckptError as error:
            error.hint = "; ".join(part for part in (error.hint, *self.files_now) if part)
            raise

    def _perform(self) -> Report:
        came_up = False
        try:
            self.source.belongs_to(self.run)
            self.enclosing = enclosing.Enclosing(self.facts, self.run)
            self.notes += secretplace.notes(self.source.secret_place, self.run.directory)
            self.packed = PackedMemory(self.image, self._open_frames) if is_packed(self.image) else None
            self._put_files_in_place()
            self.streams.open(self.request, self.manifest)
            with OwnerHandle(self.run, pass_fds=self.streams.pass_fds, spare=self.spare) as owner:
                try:
                    self.bring_up = self._ordered(owner)
                    said = self.bring_up.until_it_runs(owner)
                    came_up = True
                    if self.departure is not None:
                        self.departure.running()
                    self.notes += self.files.keep() if self.files is not None else []
                    return self._watch(owner, said, self.bring_up)
                finally:
                    owner.channel.close()
                    owner.reap(REAP_SECONDS)
        except OSError as error:
            raise RestoreFailed(f"the restore could not be prepared: {error.strerror} ({error.filename})") from None
        except GpuckptError as error:
            came_up = came_up or error.process == "restored"
            raise
        finally:
            self.streams.close()
            if self.packed is not None:
                self.packed.close()
            if self.files is not None:
                # As whoever finds the journal of a run that was killed: a tree that came alive has them open.
                keep = came_up or runs.came_alive(self.run.directory)
                self.files_now = self.files.keep() if keep else self.files.take_back()
                self.files.close()

    def _open_frames(self, index: Index) -> FrameSource:
        found = self.source.open_frames(index)
        return found if self.departure is None else self.departure.frames(found, index)

    def _put_files_in_place(self) -> None:
        self.files = openfiles.FilesInPlace(
            self.image,
            self.run,
            self.interruption.check,
            self.files_seen,
            # CRIU makes files that were deleted anew under their old names, for a moment.
            alone=self.request.own_pids and any(file.deleted for file in self.manifest.tree.files),
            shared=self.request.clone,
            elsewhere=lambda path: checks.has_own_place(self.facts, path),
        )
        try:
            self.files.put(checks.file_acts(self.facts))
        except BrokenOff as trouble:
            raise interrupted(trouble, "all files are as before") from None

    def _ordered(self, owner: OwnerHandle) -> BringUp:
        """Make the directory that CRIU reads, and the order."""
        try:
            lean, notes = restoreorder.prepare(
                *(self.source, self.facts, self.run, self.packed, self.enclosing, owner.pid, self.interruption.check)
            )
        except BrokenOff as trouble:
            # The owner has no order that it could break off; it ends when we do.
            raise nothing_touched(trouble) from None
        self.notes += notes
        order = restoreorder.order(
            *(self.manifest, self.facts, self.findings, self.run, lean, self.enclosing, self.streams),
            self.interruption.left_seconds(),
            transaction=self.departure.transaction if self.departure is not None else "",
        )
        return BringUp(
            *(self.source, self.machine, self.interruption, self.run, self.departure, order),
            packed=self.packed,
            lean=lean,
            notes=self.notes,
        )

    def _watch(self, owner: OwnerHandle, said: dict[str, Any], bring_up: BringUp) -> Report:
        """It is up. Note where it comes from, then look at it, or wait for its end."""
        lean = bring_up.lean
        tree = from_json(TreeOrder, said["tree"])
        gather.note_lineage(tree.root, self.manifest)
        self.hooked.pid = tree.root.pid
        lean.remove_pages()
        self.source.let_go()
        self.notes += self.source.notes
        self.notes += said.get("notes", ())
        if not self.request.wait and said.get("cgroup") and said["cgroup"] == procfs.cgroup_of(os.getpid()):
            self.notes.append(
                f"the tree has no cgroup of its own; it stays in {said['cgroup']} and may end with what runs there"
            )
        data: dict[str, Any] = {
            "image": self.request.name,
            "image_id": self.manifest.image_id,
            "root_pid": tree.root.pid,
            "pids": [one.pid for one in tree.ids],
            "seconds": {**self.source.seconds, **said["seconds"]},
            "cgroup": said.get("cgroup"),
            "bytes_injected": lean.bytes_injected,
            "bytes_filled": bring_up.bytes_filled,
            "bytes_by_criu": lean.bytes_by_criu,
            "files": self.files.done if self.files is not None else [],
            "notes": self.notes,
            **self.source.report(),
            **self.enclosing.in_report(said),
        }
        data["restored_seconds"] = time.monotonic() - self.began
        if self.request.wait:
            return self._wait(owner, tree, data)
        self.root = tree.root
        since = time.monotonic()
        try:
            if self.request.readiness.asked_for:
                data |= self._see_ready(tree, self.interruption.check)
                data["seconds"]["ready"] = time.monotonic() - since
            settle.require_alive(tree.ids, max(0.0, self.request.settle_seconds - (time.monotonic() - since)))
        except BrokenOff as trouble:
            what = f"process {tree.root.pid} is restored and runs, whether it is ready is not known"
            raise interrupted(trouble, what, restored=True) from None
        data["gpu_memory_bytes"] = settle.require_on_gpu(tree, self.machine, force_program=self.request.force_program)
        data["seconds"].setdefault("ready", time.monotonic() - since)
        return Report("restore", "ok", "restored", data, self.findings)

    def still_there(self, report: Report) -> Report:
        """The report of a restore whose tree --post-restore has not ended. Raises RestoredUnhealthy."""
        root = self.root
        if self.request.hooks.after is not None and root is not None and procfs.state(root) in procfs.ENDED:
            why = f"process {root.pid} ended while --post-restore ran"
            raise RestoredUnhealthy(why, "try the command by itself")
        return report

    def _see_ready(self, tree: TreeOrder, check: Callable[[], None]) -> dict[str, Any]:
        return readiness.see_ready(
            self.request.readiness,
            tree.root,
            self.machine,
            self.hooked.variables("ready"),
            began=self.began,
            check=check,
        )

    def _wait(self, owner: OwnerHandle, tree: TreeOrder, data: dict[str, Any]) -> Report:
        """Stay until the job ends. Its readiness is told beside that, and changes nothing."""
        # From here on the run's directory is anybody's who finds it.
        self.run.owe(None)
        self.run.release()
        beside = Beside(
            self.hooked, lambda check: self._see_ready(tree, check) if self.request.readiness.asked_for else {}
        )
        with beside:
            status = JobWait(owner, self.streams.relay, self.interruption).until_it_ends()
        data |= {**beside.data, "exit_status": status}
        return Report("restore", "ok", "ended", data, (*self.findings, *beside.findings))

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

import contextlib
import os
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from gpuckpt import checks
from gpuckpt.flows import (
    enclosing,
    gather,
    hooks,
    imagesource,
    injecting,
    openfiles,
    readiness,
    secretplace,
    settle,
    verifying,
)
from gpuckpt.flows import repair as repairing
from gpuckpt.flows.beside import Beside
from gpuckpt.flows.conversation import (
    REAP_SECONDS,
    OwnerGone,
    OwnerSays,
    hear,
    repair_with_second_owner,
    tell,
)
from gpuckpt.flows.interruption import BrokenOff
from gpuckpt.flows.jobwait import JobWait
from gpuckpt.flows.leandir import LeanDirectory, PackedMemory, Preparation, is_packed
from gpuckpt.flows.places import require_places
from gpuckpt.images import criuformat, ports, timers
from gpuckpt.model.errors import (
    GpuckptError,
    ImageCorrupt,
    Interrupted,
    MachineLacks,
    ProcessState,
    RestoredUnhealthy,
    RestoreFailed,
)
from gpuckpt.model.jsonform import from_json
from gpuckpt.model.report import Event, Finding, Report
from gpuckpt.owner import networklock, runs
from gpuckpt.owner.handle import OwnerHandle, spare_owner
from gpuckpt.owner.messages import INHERITED_FD, CudaMember, Inherited, PeerGone, RestoreOrder, TreeOrder
from gpuckpt.system import procfs
from gpuckpt.system.terminal import PtyRelay

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from gpuckpt.checks import RestoreFacts
    from gpuckpt.checks.facts import CapturedHere
    from gpuckpt.flows.imagesource import ImageSource
    from gpuckpt.flows.interruption import Interruption
    from gpuckpt.flows.machine import Machine
    from gpuckpt.flows.openfiles import FilesInPlace
    from gpuckpt.images.framesource import FrameSource
    from gpuckpt.images.memory import MemoryPlan
    from gpuckpt.images.packindex import Index
    from gpuckpt.model.facts import OpenFile, ProcessId, Stdio
    from gpuckpt.model.manifest import CriuOptions, Manifest
    from gpuckpt.model.requests import RestoreRequest
    from gpuckpt.owner.handle import SpareOwner
    from gpuckpt.owner.runs import Run
    from gpuckpt.stores.directory import Image


NO_CUDA = "--huge-pages did nothing: no process of the image uses CUDA"
OWNER_KILLED = "the process that held the tree (the owner) was killed"


class Departure(Protocol):
    """In a migration: who says when the tree that stands ready here may run."""

    transaction: str
    spare: SpareOwner | None
    """An owner that is there already."""

    def frames(self, source: FrameSource, index: Index) -> FrameSource:
        """The frames of the image, some of which may be here already."""

    def ready(self) -> None:
        """It stands ready; returns when it may run. Raises BrokenOff."""

    def running(self) -> None:
        """It runs."""


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
        raise _nothing_touched(trouble) from None


def _compare(image: Image, interruption: Interruption) -> dict[str, CapturedHere]:
    try:
        return openfiles.compare(image, interruption.check)
    except BrokenOff as trouble:
        raise _nothing_touched(trouble) from None


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
    something_is_left: bool = False
    hooked: hooks.Hooked = field(init=False)
    """The user's commands around it."""
    root: ProcessId | None = None
    """Of the tree that was let go and is not waited for."""
    relay: PtyRelay | None = None
    streams: dict[int, int] = field(default_factory=dict)
    """With --wait: our own standard streams -> the descriptors under which the owner has them."""
    files: FilesInPlace | None = None
    """What was put back or changed on this host."""
    files_now: list[str] = field(default_factory=list)
    """What a restore that fails must say of files: what stays changed, or could not be taken back."""
    notes: list[str] = field(default_factory=list)
    packed: PackedMemory | None = None
    lean: LeanDirectory | None = None
    departure: Departure | None = None
    spare: SpareOwner | None = None
    """An owner that is there already."""
    enclosing: enclosing.Enclosing = field(init=False)

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

    def __post_init__(self) -> None:
        root, request = self.manifest.tree.root.pid, self.request
        self.hooked = hooks.Hooked(
            *("restore", request.hooks, root, request.name, self.run, self.machine, self.interruption),
            broken_off=_nothing_touched,
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
            if self.request.wait and checks.needs_terminal(self.manifest.tree):
                self.relay = PtyRelay()
            if self.request.wait:
                # Copies: the owner's own descriptors 0-2 are others, and CRIU's too.
                self.streams = {number: os.dup(number) for number in (0, 1, 2)}
            masters = (self.relay.master,) if self.relay is not None else ()
            with OwnerHandle(self.run, pass_fds=(*self.streams.values(), *masters), spare=self.spare) as owner:
                try:
                    said = self._build(owner)
                    came_up = True
                    if self.departure is not None:
                        self.departure.running()
                    self.notes += self.files.keep() if self.files is not None else []
                    return self._watch(owner, said)
                finally:
                    owner.channel.close()
                    owner.reap(REAP_SECONDS)
        except OSError as error:
            raise RestoreFailed(f"the restore could not be prepared: {error.strerror} ({error.filename})") from None
        except GpuckptError as error:
            came_up = came_up or error.process == "restored"
            raise
        finally:
            for copy in self.streams.values():
                os.close(copy)
            if self.relay is not None:
                self.relay.close()
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
            raise _interrupted(trouble, "all files are as before") from None

    def _build(self, owner: OwnerHandle) -> dict[str, Any]:
        try:
            order = self._order(owner)
        except BrokenOff as trouble:
            # The owner has no order that it could break off; it ends when we do.
            raise _nothing_touched(trouble) from None
        try:
            owner.give(order)
            if self.lean is not None and self.lean.plan is not None:
                held = hear(owner, ("held",), self.machine, self.interruption)
                self._inject(owner, self.lean.plan, {int(number): pid for number, pid in held["pids"].items()})
            if self.departure is not None:
                return self._depart(owner, self.departure)
            return hear(owner, ("restored",), self.machine, self.interruption)
        except BrokenOff as trouble:
            return self._abort(owner, trouble)
        except OwnerSays as last:
            raise self._error_from(last.message) from None
        except (OwnerGone, PeerGone):
            return self._repair()

    def _depart(self, owner: OwnerHandle, departure: Departure) -> dict[str, Any]:
        """Wait until the other host has given it away. From then on its owner decides, and nothing breaks it off."""
        hear(owner, ("prepared",), self.machine, self.interruption)
        departure.ready()
        tell(owner, "go")
        return hear(owner, ("restored",), self.machine)

    def _inject(self, owner: OwnerHandle, plan: MemoryPlan, pids: Mapping[int, int]) -> None:
        """Fill the held tree; where that fails the owner ends it, before an instruction of it has run."""
        assert self.packed is not None  # noqa: S101 - there is no plan without
        try:
            injecting.inject(self.packed, plan, pids, self._while_memory_comes)
        except (ImageCorrupt, RestoreFailed) as error:
            raise self._end_held(owner, error) from None
        tell(owner, "injected")

    def _while_memory_comes(self) -> None:
        self.interruption.check()
        self.source.show_progress()

    def _end_held(self, owner: OwnerHandle, error: GpuckptError) -> GpuckptError:
        """The error to raise once the owner has ended the tree."""
        with contextlib.suppress(OwnerGone):
            tell(owner, "abort")
        try:
            hear(owner, ("restored",), self.machine)
        except OwnerSays as last:
            if last.message["say"] != "failed" or last.message["left"]:
                return self._error_from(last.message)
        error.message += "; nothing is left behind"
        return error

    def _abort(self, owner: OwnerHandle, trouble: BrokenOff) -> dict[str, Any]:
        """Undo what can be undone. With --wait a signal that comes too late for that goes to the job."""
        try:
            tell(owner, "abort")
            said = hear(owner, ("restored",), self.machine)
        except OwnerSays as last:
            if last.message.get("left") or "left" not in last.message:
                raise self._error_from(last.message) from None
            cause = "" if last.message.get("broken_off") else last.message["message"]
            raise _interrupted(trouble, "nothing is left behind", cause=cause) from None
        except OwnerGone:
            said = self._repair()
        if self.request.wait:
            return said
        root = said["tree"]["root"]["pid"]
        raise _interrupted(trouble, f"it came too late: process {root} is restored and runs", restored=True) from None

    def _order(self, owner: OwnerHandle) -> RestoreOrder:
        manifest = self.manifest
        self.lean = self._prepare(owner)
        return RestoreOrder(
            run_directory=str(self.run.directory),
            tree=self._tree_order(),
            criu=self.facts.host.criu.path or "",
            images=str(self.enclosing.show(enclosing.LEAN, self.lean.path)),
            options=self._options(),
            handed_over_stopped=manifest.handed_over_stopped,
            inherited=self._inherited(),
            gpu_map=checks.resolve_map(self.request.gpu_map, manifest.host.gpu.gpus, self.facts.host.gpu.gpus)[0],
            wait=self.request.wait,
            terminal=self.relay.slave_path if self.relay else None,
            master=self.relay.master if self.relay else None,
            cgroup_name=None if self.request.wait else f"{manifest.tree.root.pid}-{self.run.id}",
            deadline_seconds=self.interruption.left_seconds(),
            force_program=self.request.force_program,
            lean=self.lean.plan is not None,
            huge_pages=self.request.huge_pages,
            transaction=self.departure.transaction if self.departure is not None else "",
            enclosed=self.enclosing.order(),
            driver=self.facts.host.gpu,
        )

    def _tree_order(self) -> TreeOrder:
        manifest = self.manifest
        members = tuple(CudaMember(one.id, one.restore_tid, one.gpu_memory_bytes) for one in manifest.cuda)
        return TreeOrder(manifest.tree.root, manifest.tree.ids, manifest.stopped, members)

    def _prepare(self, owner: OwnerHandle) -> LeanDirectory:
        """Make the directory that CRIU reads, and decide what it shall not see."""
        plan = None
        if self.packed is not None:
            criu = self.image.part("criu")
            plan, note = injecting.plan(self.packed, criu, owner.pid, plain=self.request.plain)
            self.notes += [note] if note else []
        return Preparation(
            self.image,
            self.run.directory,
            self.packed,
            plan,
            self.facts.host.memory_available_bytes,
            self._for_this_restore,
            self.interruption.check,
            self.enclosing.show(enclosing.IMAGE, self.image.root),
            self.source.secret_place,
        ).make()

    def _options(self) -> CriuOptions:
        allowed = any(finding.id == "cpu-flags" and finding.allowed for finding in self.findings)
        return replace(self.manifest.criu, cpu_cap="none") if allowed else self.manifest.criu

    def _for_this_restore(self, files_img: bytes) -> bytes:
        """What CRIU shall find in files.img: timers that go on, and connections closed where that was decided."""
        edited = timers.rearm(files_img)
        if self.facts.tcp == "close":
            # CRIU's own --tcp-close would close the connections inside the tree as well.
            edited = criuformat.close_sockets(
                edited, {socket.inode for socket in criuformat.outside_sockets(files_img)}
            )
        return ports.move(edited, self.request.ports)

    def _inherited(self) -> tuple[Inherited, ...]:
        return tuple(found for stdio in self.manifest.tree.outside_stdio if (found := self._inherit(stdio)) is not None)

    def _inherit(self, stdio: Stdio) -> Inherited | None:
        """Where an outside end goes: the given file, with --wait our own stream, for a terminal CRIU's stdin."""
        if stdio.kind == "tty":
            # A job that joins the owner's session gets the pty as CRIU's stdin.
            if self.relay is None or stdio.key not in self.manifest.criu.external:
                return None
            return Inherited(stdio.key, self.relay.slave_path, readable=True, writable=True)
        path = self.request.stdio.get(stdio.fd)
        if path is not None:
            return Inherited(stdio.key, str(path), **_access(stdio))
        return (
            Inherited(stdio.key, f"{INHERITED_FD}{self.streams[stdio.fd]}", **_access(stdio)) if self.streams else None
        )

    def _watch(self, owner: OwnerHandle, said: dict[str, Any]) -> Report:
        """It is up. Note where it comes from, then look at it, or wait for its end."""
        tree = from_json(TreeOrder, said["tree"])
        gather.note_lineage(tree.root, self.manifest)
        self.hooked.pid = tree.root.pid
        assert self.lean is not None  # noqa: S101 - it was made for the order
        self.lean.remove_pages()
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
            "bytes_injected": self.lean.bytes_injected,
            "bytes_by_criu": self.lean.bytes_by_criu,
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
            raise _interrupted(trouble, what, restored=True) from None
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
            status = JobWait(owner, self.relay, self.interruption).until_it_ends()
        data |= {**beside.data, "exit_status": status}
        return Report("restore", "ok", "ended", data, (*self.findings, *beside.findings))

    def _error_from(self, message: dict[str, Any]) -> GpuckptError:
        """The owner's last word as the error the user sees."""
        if message["say"] == "lacks":
            return MachineLacks(message["message"], message["hint"])
        if message["say"] == "crashed":
            self._repair()
            return RestoreFailed("the process that held the tree (the owner) failed")
        log = self.run.keep_log(Path(message["log"])) if message.get("log") else None
        hint = "; ".join(part for part in (message["hint"], f"CRIU's log: {log}" if log else "") if part)
        if message["left"]:
            self.something_is_left = True
            left = ", ".join(str(pid) for pid in message["left"])
            return RestoreFailed(f"{message['message']}; processes {left} could not be ended", hint, process="frozen")
        return RestoreFailed(message["message"], hint)

    def _repair(self) -> dict[str, Any]:
        """The owner is gone: a second one ends what was half built, or finds the tree whole."""
        order = self._tree_order()
        said = repair_with_second_owner(
            self.run, order, self.machine, left_behind=str(self.run.directory), force_program=self.request.force_program
        )
        alive = runs.came_alive(self.run.directory)
        if said is None or said["state"] == "frozen":
            self.something_is_left = True
            raise RestoreFailed(
                f"{OWNER_KILLED} after the tree came alive; whether all of it runs is not known"
                if alive
                else f"{OWNER_KILLED}, and what it left could not be ended",
                # In a pid namespace that pid is another's; any later restore ends what is half-built there.
                "repeat the command" if self.request.own_pids else f"run `gpuckpt restore --tree {order.root.pid}`",
                process="frozen",
            )
        if said["state"] == "gone" and alive:
            why = f"{OWNER_KILLED}; the tree came alive and has ended since"
            raise RestoredUnhealthy(why, "its own output says why")
        if said["state"] == "gone" or said["duty"] != "nothing":
            try:
                self.interruption.check()  # what killed the owner may have been meant for all of us
            except BrokenOff as trouble:
                raise _interrupted(trouble, "nothing is left behind") from None
            raise RestoreFailed(OWNER_KILLED)
        self.notes.append("the owner was killed after the tree came alive")
        ids = said["ids"]
        return {"tree": {"root": ids[0], "ids": ids, "stopped": [], "cuda": []}, "seconds": {}}


def _access(stdio: Stdio) -> dict[str, bool]:
    """What the tree does with this end. A socket is open for both: there its descriptors' numbers tell."""
    if stdio.kind != "socket":
        return {"readable": not stdio.writable, "writable": stdio.writable}
    numbers = {int(holder.rpartition(" ")[2]) for holder in stdio.holders}
    return {"readable": 0 in numbers, "writable": numbers != {0}}


def _nothing_touched(trouble: BrokenOff) -> GpuckptError:
    return _interrupted(trouble, "nothing was touched")


def _interrupted(trouble: BrokenOff, what: str, *, restored: bool = False, cause: str = "") -> GpuckptError:
    """The error to raise; `cause`: what it was waiting for, where a deadline broke it off."""
    process: ProcessState = "restored" if restored else "untouched"
    if trouble.signal_number is not None:
        return Interrupted(trouble.signal_number, f"broken off: {trouble.why}; {what}", process=process)
    if restored:
        return RestoredUnhealthy(f"broken off: {trouble.why}; {what}", "look at the job yourself", process=process)
    # What a failed restore leaves is in the meaning of its status, which stands in front of this.
    return RestoreFailed(": ".join(filter(None, ("broken off", trouble.why, cause))), "give it more time")

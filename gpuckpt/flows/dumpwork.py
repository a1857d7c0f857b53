"""One dump at work, after its checks have passed: steps 2 to 5 of flows/dump.py, which says what a crash leaves.

A migration is one with another ending (flows/handover.py).
"""

from __future__ import annotations

import os
import time
from dataclasses import field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpuckpt import checks
from gpuckpt.flows import capturing, composing, dumpfailures, dumporder, gather, openfiles, secretplace, settle
from gpuckpt.flows.composing import Capture
from gpuckpt.flows.conversation import (
    OWNER_KILLED,
    REAP_SECONDS,
    OwnerGone,
    OwnerSays,
    hear,
    repair_with_second_owner,
    seen_of,
    tell,
)
from gpuckpt.flows.interruption import BrokenOff
from gpuckpt.flows.sealing import Sealing
from gpuckpt.images import captured as captured_files
from gpuckpt.model import manifest as manifests
from gpuckpt.model.errors import DumpFailed, GpuckptError, MachineLacks, NotFound, ProcessState, Refused, TreeHeld
from gpuckpt.model.manifest import Manifest
from gpuckpt.model.records import dataclass
from gpuckpt.model.report import Event, Finding, Report
from gpuckpt.owner import journal, runs
from gpuckpt.owner.handle import OWNER_LOG, OwnerHandle
from gpuckpt.owner.messages import DumpOrder, Given, PeerGone, TreeOrder
from gpuckpt.stores import partialimage
from gpuckpt.system import signatures

if TYPE_CHECKING:
    from collections.abc import Callable

    from gpuckpt.checks.facts import DumpFacts
    from gpuckpt.flows.capturing import Capturing
    from gpuckpt.flows.farpacks import FarPacks
    from gpuckpt.flows.interruption import Interruption
    from gpuckpt.flows.machine import Machine
    from gpuckpt.flows.openfiles import SavedFiles
    from gpuckpt.model.facts import Tree
    from gpuckpt.model.requests import DumpRequest
    from gpuckpt.owner.handle import SpareOwner
    from gpuckpt.owner.runs import Run
    from gpuckpt.stores.directory import Image
    from gpuckpt.stores.partialimage import PartialImage
    from gpuckpt.system.files import Placed


@dataclass
class DumpWork:
    """One dump at work, after its checks have passed."""

    request: DumpRequest
    machine: Machine
    interruption: Interruption
    facts: DumpFacts
    findings: tuple[Finding, ...]
    run: Run
    base: Image | None = None
    sealing: Sealing | None = None
    tree_is_held: bool = False
    notes: list[str] = field(default_factory=list)
    on_published: Callable[[], None] = lambda: None
    published: bool = False
    image_id: str = field(default_factory=lambda: os.urandom(16).hex())
    given: Given = "resume"
    """What becomes of the tree when the owner is killed and the journal cannot tell: a migration knows more."""
    far: FarPacks | None = None
    """A migration's: where its packs grow."""
    manifest: Manifest | None = None
    way: Capturing = field(init=False)
    """How the images reach the disk."""
    captured_files: list[dict[str, Any]] = field(default_factory=list)
    """Of the tree's open files, those in the image: path, bytes, seconds."""
    spare: SpareOwner | None = None
    """An owner that is there already."""
    litter: tuple[Placed, ...] = ()
    """What CRIU leaves beside the tree's files when it ends the tree; the owner removes it, or we do."""

    def look_again(self) -> None:
        """What the tree and the host are after --pre-dump. Raises what refuses then, NotFound, Busy."""
        facts = gather.dump_facts(self.request, self.machine)
        root = self.facts.tree.root
        if facts.tree.root != root:
            raise NotFound(f"process {root.pid} ended while --pre-dump ran; another one has its pid", "nothing to save")
        runs.follow(self.run, facts.tree.ids)
        self.facts = facts
        self.findings = checks.judge(checks.DUMP_CHECKS, facts, self.request.allow)
        refusal = checks.refusal(self.findings)
        if refusal is not None:
            raise refusal

    def perform(self) -> Report:
        """Suspend, capture, publish, commit; any failure ends in the unwind and says what was seen."""
        partial = self._create_partial()
        try:
            partial = self._hidden(partial)
            self.way = self._prepare(partial)
            try:
                with OwnerHandle(self.run, spare=self.spare) as owner:
                    try:
                        return self._converse(owner, partial)
                    finally:
                        owner.channel.close()
                        owner.reap(REAP_SECONDS)
            finally:
                self.way.close()
        finally:
            self._put_away(partial)

    def _put_away(self, partial: PartialImage) -> None:
        if self.sealing is not None:
            self.sealing.close()
        if not self.published:
            partial.discard()

    def _hidden(self, partial: PartialImage) -> PartialImage:
        if self.sealing is None:
            return partial
        try:
            hidden = self.sealing.hide(partial, self.run.directory)
        except OSError as error:
            raise DumpFailed(*dumpfailures.cause({}, error)) from None
        self.notes += secretplace.notes(hidden.secret, self.run.directory)
        return hidden

    def _prepare(self, partial: PartialImage) -> Capturing:
        known = len(self.notes)
        try:
            program = self.facts.host.criu
            way = capturing.prepare(
                self.request, program, self.run, partial, self.base, self.notes, self.far, self.sealing
            )
        except OSError as error:
            raise DumpFailed(*dumpfailures.cause({}, error)) from None
        for note in self.notes[known:]:
            self.machine.listener(Event("capture", "note", note))
        return way

    def _create_partial(self) -> PartialImage:
        try:
            partial, note = partialimage.create_partial(self.request.image)
        except OSError as error:
            why = f"{self.request.image} cannot be made: {error.strerror}"
            raise Refused(why, "make room there, or name another place for it") from None
        if note:
            self.notes.append(note)
            self.machine.listener(Event("capture", "note", note))
        return partial

    def _converse(self, owner: OwnerHandle, partial: PartialImage) -> Report:
        try:
            self.way.start()
            owner.give(self._order())
            try:
                capture = self._captured(owner, partial)
                self._at_gate(owner, capture)
            except (OSError, BrokenOff, GpuckptError) as trouble:
                return self._abort(owner, trouble)
            self.litter = () if self.request.leave_running else captured_files.litter(capture.saved)
            tell(owner, "commit", litter=[one.to_json() for one in self.litter])
            return self._after_resume(owner, capture) if self.request.leave_running else self._after_end(owner)
        except OwnerSays as last:
            return self._bad_end(last.message, self.way.trouble())
        except (OwnerGone, PeerGone):
            self.way.abort()
            return self._repair()

    def _at_gate(self, _owner: OwnerHandle, capture: Capture) -> None:
        """What must have happened before CRIU may pass. A failure here lets the tree go on."""
        if not self.request.leave_running:
            self._publish(capture, None)

    def _keep_alive(self) -> None:
        """Called while the capture goes on; may raise GpuckptError."""

    def _order(self) -> DumpOrder:
        left = self.interruption.left_seconds()
        return dumporder.order(self.request, self.facts, self.run, self.way.images, left, stream=self.way.streamed)

    def _captured(self, owner: OwnerHandle, partial: PartialImage) -> Capture:
        """CRIU stands at the gate, the tree stands still, the images are complete: save what will not stay."""

        def report_progress() -> None:
            if self.way.made_progress():
                tell(owner, "progress")
            self._keep_alive()

        words = ("captured", "giving-up")
        said = hear(owner, words, self.machine, self.interruption, meanwhile=report_progress)
        if said["say"] == "giving-up":
            self.way.abort()
            hear(owner, (), self.machine)
        self.way.complete(self.interruption.check)
        tree = self._tree_at_rest()
        self.interruption.check()
        saved = captured_files.save_link_remaps(partial.criu, partial.files, captured_files.deleted_files(tree))
        self._judge_again(tree)
        files = self._save_files(tree, partial)
        return Capture(partial, said, saved, files, tree)

    def _tree_at_rest(self) -> Tree:
        return gather.tree_at_rest(self.facts.tree, keep_argv=self.request.keep_argv)

    def _save_files(self, tree: Tree, partial: PartialImage) -> SavedFiles:
        files = openfiles.save(self.request, tree, partial.files, self.interruption.check)
        if files.left:
            self._judge_again(tree, files.left)
        self.captured_files = files.in_words()
        return files

    def _judge_again(self, tree: Tree, not_captured: dict[str, str] | None = None) -> None:
        """Between the first look and the freeze the tree ran on: what it became must pass the checks as well."""
        now = replace(self.facts, tree=tree, not_captured=not_captured or {})
        findings = checks.judge(checks.AT_REST_CHECKS, now, self.request.allow)
        judged = {finding.id for finding in findings}
        self.findings = (*(one for one in self.findings if one.id not in judged), *findings)
        refusal = checks.refusal(findings)
        if refusal is not None:
            raise refusal

    def _after_end(self, owner: OwnerHandle) -> Report:
        done = hear(owner, ("ended",), self.machine)
        return self._report(done, process="ended")

    def _after_resume(self, owner: OwnerHandle, capture: Capture) -> Report:
        """The tree goes on; a failure from here on costs the image, not the job."""
        done = hear(owner, ("resumed",), self.machine)
        try:
            self._publish(capture, done)
        except (OSError, GpuckptError) as trouble:
            if done["state"] == "running":
                why, hint = dumpfailures.cause({}, trouble)
                raise dumpfailures.runs_on(why, hint, trouble, self._published_image) from None
        ended = done["state"] == "gone" and all(one.state == "gone" for one in seen_of(done))
        if done["state"] != "running" and not (ended and self.published and not done["problem"]):
            raise self._error_from(done)
        if not ended and settle.stays_alive(self.facts.tree.ids, self.request.settle_seconds):
            return self._report(done, process="running")
        # Whether that was its own end nobody can tell who is not its parent; the image holds what was before.
        self.notes.append(f"process {self.facts.tree.root.pid} ended by itself soon after it went on")
        return self._report(done, process="ended")

    def _publish(self, capture: Capture, done: dict[str, Any] | None) -> None:
        """Digest, write down, sync, rename. `done` is the owner's word when the tree goes on already."""
        check = self.interruption.check if done is None else lambda: None
        raw = self._compose(capture, done, check, capture.partial.sync_parts)
        capture.partial.publish(raw, self._signature(raw))
        self.published = True
        self.on_published()

    def _compose(
        self, capture: Capture, done: dict[str, Any] | None, check: Callable[[], None], seal: Callable[[], None]
    ) -> bytes:
        """Finish all parts, `seal` them, and make the manifest. Raises GpuckptError, OSError, what `check` raises."""
        began = time.monotonic()
        self.machine.listener(Event("publish", "begin"))
        partial = capture.partial
        composing.refuse_other_processes(partial.criu, capture.tree)
        content = self.way.content(partial, check)
        composing.copy_log(Path(capture.said["log"]), partial, self.sealing)
        seal()
        check()
        seconds = {**capture.said["seconds"], **(done["seconds"] if done else {})}
        seconds |= {"files": capture.files.seconds} if capture.files.files else {}
        seconds["publish"] = time.monotonic() - began
        self.manifest = composing.manifest_of(
            *(capture, content, seconds, done),
            request=self.request,
            facts=self.facts,
            findings=self.findings,
            notes=self.notes,
            base=self.base,
            image_id=self.image_id if self.sealing is None else self.sealing.image_id,
        )
        stored = content.stored
        public = self.manifest if self.sealing is None else self.sealing.manifest(partial, self.manifest, stored)
        raw = manifests.encode(public)
        # What cannot be read again may not be called an image: the tree goes on.
        manifests.decode(raw, str(self.request.image / manifests.NAME))
        return raw

    def _signature(self, raw_manifest: bytes) -> bytes:
        key = self.request.sign_key
        return b"" if key is None else signatures.sign(key, raw_manifest)

    def _report(self, done: dict[str, Any], process: ProcessState) -> Report:
        assert self.manifest is not None  # noqa: S101 - published
        if process == "ended":
            captured_files.remove(self.litter)
        self.notes += done.get("notes", ())
        captured = {one["path"] for one in self.captured_files}
        data = {
            "image": str(self.request.image),
            "image_id": self.manifest.image_id,
            "root_pid": self.facts.tree.root.pid,
            "pids": list(self.manifest.tree.pids),
            "bytes_raw": self.manifest.bytes_raw,
            "bytes_stored": self.manifest.bytes_stored,
            "bytes_shared": self.manifest.bytes_shared,
            "seconds": {**self.manifest.seconds, **done["seconds"]},
            "frozen_seconds": done.get("frozen_seconds", self.manifest.frozen_seconds),
            "stopped_seconds": done.get("stopped_seconds", self.manifest.stopped_seconds),
            "captured_files": self.captured_files,
            **composing.restorable(self.manifest, captured, left_running=self.request.leave_running),
            "notes": list(dict.fromkeys((*self.manifest.notes, *self.notes)))
            + [f"ended, not yet reaped: {why}" for why in done.get("not_reaped", ())],
        }
        return Report("dump", "ok", process, data, self.findings)

    def _abort(self, owner: OwnerHandle, trouble: Exception) -> Report:
        """Before the commit: tell the owner to undo, and say what it saw. After it: the image decides."""
        self.way.abort()
        try:
            tell(owner, "abort")
            hear(owner, (), self.machine)
        except OwnerSays as last:
            return self._bad_end(last.message, trouble)
        except OwnerGone:
            return self._repair(trouble)
        raise AssertionError("hear() without words ends only by an exception")

    def _bad_end(self, message: dict[str, Any], trouble: Exception | None = None) -> Report:
        """The owner's bad last word; when it crashed a second one looks, and may yet find all well."""
        if message["say"] == "crashed":
            kept = self.run.keep_log(self.run.directory / OWNER_LOG)
            last_line = message["traceback"].strip().rpartition("\n")[2]
            why = f"a bug in gpuckpt: the process that held the tree (the owner) failed, {last_line}"
            return self._repair(trouble, why, f"report it with {kept}")
        if self.published and message.get("state") == "gone" and settle.all_end(seen_of(message)):
            self.notes.append(f"CRIU died after the image was complete ({message['message']}), and the tree with it")
            return self._report({"seconds": {}}, process="ended")
        raise self._error_from(message, trouble) from None

    def _error_from(self, message: dict[str, Any], trouble: Exception | None = None) -> GpuckptError:
        """The owner's last word as the error the user sees."""
        if message["say"] == "lacks":
            return MachineLacks(message["message"], message["hint"])
        why, hint = dumpfailures.cause(message, trouble)
        log = self.run.keep_log(Path(message["log"])) if message.get("log") else None
        hint = "; ".join(part for part in (hint, f"CRIU's log: {log}" if log and trouble is None else "") if part)
        if message["state"] == "running":
            return dumpfailures.runs_on(why, hint, trouble, self._published_image)
        return self._held(why, message)

    def _broken_off(self) -> BrokenOff | None:
        try:
            self.interruption.check()
        except BrokenOff as trouble:
            return trouble
        return None

    @property
    def _published_image(self) -> Path | None:
        return self.request.image if self.published else None

    def _held(self, why: str, message: dict[str, Any]) -> GpuckptError:
        self.tree_is_held = message["state"] == "frozen"
        return dumpfailures.not_running(why, message, self.facts.tree.root.pid, self._published_image)

    def _repair(self, trouble: Exception | None = None, why: str = OWNER_KILLED, hint: str = "dump again") -> Report:
        """The owner is gone: a second one looks at the tree. Raises what it saw, unless all ended as it should."""
        tree = self.facts.tree
        order = TreeOrder(tree.root, tree.ids, tree.stopped, dumporder.members(tree))
        message = repair_with_second_owner(
            self.run,
            order,
            self.machine,
            left_behind=str(self.run.directory),
            force_program=self.request.force_program,
            given=self.given,
        )
        trouble = trouble or self._broken_off()  # what killed the owner may have been meant for all of us
        if message is None and not journal.read(self.run.directory).has("order"):
            raise dumpfailures.as_interrupted(trouble) or DumpFailed(f"{why} before it touched the tree", hint)
        if message is None:
            self.tree_is_held = True
            raise TreeHeld(
                f"{why}, and a second one could not look at the tree",
                f"run `gpuckpt restore --tree {tree.root.pid}`",
            )
        if message["duty"] == "finish-ending" and self.published:
            self.notes.append(f"{why} after the image was complete")
            return self._report({"seconds": {}}, process="ended")
        if message["state"] == "running":
            raise dumpfailures.runs_on(why, hint, trouble, self._published_image)
        raise self._held(why, message)

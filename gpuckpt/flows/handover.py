"""The ending of a migration: what happens while the tree stands at the gate, and what is told then (see migrate.py)."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpuckpt import checks
from gpuckpt.flows import attempts, capturing, carrying, workdirs
from gpuckpt.flows.conversation import OwnerGone, OwnerSays, hear, seen_of, tell, words_for_seen
from gpuckpt.flows.destination import Destination, beside
from gpuckpt.flows.dumpwork import DumpWork
from gpuckpt.flows.farpacks import FarPacks
from gpuckpt.flows.interruption import BrokenOff, Interruption
from gpuckpt.flows.vigil import Vigil
from gpuckpt.model.errors import (
    DumpFailed,
    GoUnanswered,
    GpuckptError,
    Interrupted,
    NotFound,
    RestoredUnhealthy,
    TransferFailed,
    TreeHeld,
    in_words,
)
from gpuckpt.model.migration import INCOMING_PLACE, Terms
from gpuckpt.model.report import Event, Report
from gpuckpt.owner import runs
from gpuckpt.stores.spool import SpoolOffer
from gpuckpt.system.links import LinkLost
from gpuckpt.system.ssh_failures import NotReached

if TYPE_CHECKING:
    from collections.abc import Callable

    from gpuckpt.flows.capturing import Capturing
    from gpuckpt.flows.composing import Capture
    from gpuckpt.flows.destination import Look
    from gpuckpt.flows.seeding import Seed
    from gpuckpt.model.errors import ProcessState
    from gpuckpt.model.facts import Tree
    from gpuckpt.model.requests import MigrateRequest, Reach
    from gpuckpt.owner.handle import OwnerHandle
    from gpuckpt.stores.partialimage import PartialImage

MOST_CONNECTIONS = 8
"""For packs on their way: each costs a program on both sides, and an ssh takes 400 MB/s of a core."""

ALIVE_SECONDS = 1.0


def require_going_on(interruption: Interruption) -> None:
    """Before anything is touched. Raises Interrupted, DumpFailed."""
    try:
        interruption.check()
    except BrokenOff as trouble:
        raise as_interrupted(trouble) from None


def as_interrupted(trouble: BrokenOff) -> GpuckptError:
    """A signal or the deadline before anything was touched, as the error that the person sees."""
    if trouble.signal_number is None:
        return DumpFailed(f"broken off: {trouble.why}; the tree runs on")
    return Interrupted(trouble.signal_number, f"broken off: {trouble.why}; nothing was touched", process="untouched")


def discard_there(reach: Reach, terms: Terms) -> None:
    """What was sent is not needed. A host that is out of reach keeps it (flows/tidying.py)."""
    with contextlib.suppress(GpuckptError, BrokenOff):
        there = Destination(reach, lambda: None)
        try:
            there.discard(terms)
        finally:
            there.close()


@dataclass
class MigrateWork(DumpWork):
    """One migration at work, after the checks of both hosts have passed: a dump with another ending."""

    there: Destination = field(kw_only=True)
    terms: Terms = field(kw_only=True)
    wanted: MigrateRequest = field(kw_only=True)
    arrived: dict[str, Any] = field(default_factory=dict)
    """The report of the copy, and of the transfer."""
    downtime_seconds: float | None = None
    look: Callable[[], Look] = field(kw_only=True)
    """Look at both hosts again."""
    kept: bool = False
    """The image stays here."""
    seed: Seed | None = None
    files_sent: dict[str, Any] | None = None
    """What sending large files beforehand took."""
    _alive_at: float = field(default_factory=time.monotonic)

    def look_again(self) -> None:
        """What the tree and both hosts are after --pre-dump. Raises what refuses then, NotFound, Busy."""
        self.there.close()
        seen, root = self.look(), self.facts.tree.root
        if seen.facts.tree.root != root:
            raise NotFound(f"process {root.pid} ended while --pre-dump ran; another one has its pid", "nothing to move")
        runs.follow(self.run, seen.facts.tree.ids)
        self.facts, self.findings, self.there, self.terms = seen.facts, seen.findings, seen.there, seen.terms
        refusal = checks.refusal(self.findings)
        if refusal is not None:
            refusal.findings = self.findings
            raise refusal

    @property
    def _here(self) -> str:
        return self.facts.host.hostname

    def _job_is_on(self, host: str, words: str) -> None:
        self.machine.listener(Event("job", "note", words, job_is_on=host))

    def _converse(self, owner: OwnerHandle, partial: PartialImage) -> Report:
        self._job_is_on(self._here, f"the job is on {self._here}")
        return super()._converse(owner, partial)

    def _prepare(self, partial: PartialImage) -> Capturing:
        """Where nothing stays here, packs go straight to the other host: connect before the tree stands still."""
        why_not = self.wanted.keep_image is not None or capturing.why_not_streamed(self.facts.host.criu)
        if not why_not:
            count = min(self.request.workers or capturing.default_workers(), MOST_CONNECTIONS)
            count = self.wanted.reach.connections or count
            store = self.there.store
            self.far = beside(
                lambda: FarPacks(store, self._place_there, count), lambda: require_going_on(self.interruption)
            )
        unpacked = self.there.warm(self.terms, lambda: require_going_on(self.interruption))
        if self.seed is not None:
            self.seed.data["unpacked_bytes"] = unpacked
        return super()._prepare(partial)

    def _keep_alive(self) -> None:
        if time.monotonic() - self._alive_at > ALIVE_SECONDS:
            self._alive_at = time.monotonic()
            self.there.keep_alive()
            if self.far is not None:
                self.far.keep_alive()

    def _tree_at_rest(self) -> Tree:
        """With what lies below its working directories now."""
        tree, wanted = super()._tree_at_rest(), self.wanted.carry_files
        below = workdirs.look(tree, wanted, str(self.request.image), self.interruption.check)
        tree = workdirs.with_files(tree, below)
        if wanted != ("none",):
            carried = checks.chosen_files(self.request, tree).files
            self.terms = carrying.with_places(self.terms, tree, carried, below)
        return tree

    def _put_away(self, partial: PartialImage) -> None:
        if not self.kept:
            partial.discard()

    def _at_gate(self, owner: OwnerHandle, capture: Capture) -> None:
        """The tree stands still. Whatever fails before `go` lets it go on."""
        vigil = Vigil(owner, self.machine, self.interruption)
        raw = self._send(capture, vigil)
        self.machine.listener(Event("prepare", "begin"))
        begun = time.monotonic()
        self.there.prepare(self.terms, vigil.check)
        self.arrived["seconds"] = {**self.arrived["seconds"], "prepare": time.monotonic() - begun}
        self.interruption.check()
        tell(owner, "give", to=self.there.where)
        hear(owner, ("given",), self.machine)
        self._let_it_run(owner, capture)
        self._watch(owner)
        self._keep(capture, raw)

    def _keep(self, capture: Capture, raw: bytes) -> None:
        """--keep-image, once the job has gone: a migration that failed leaves nothing that the next one would find."""
        if self.wanted.keep_image is None:
            return
        try:
            capture.partial.publish(raw)
            self.kept = True
        except OSError as error:
            self.notes.append(f"{self.wanted.keep_image} could not be kept: {in_words(error)}")

    def _send(self, capture: Capture, vigil: Vigil) -> bytes:
        """The image to the other host, verified and published there; returns its manifest.

        Raises GpuckptError, OSError, BrokenOff.
        """
        keep = self.wanted.keep_image is not None
        raw = self._compose(capture, None, vigil.check, capture.partial.sync_parts if keep else lambda: None)
        assert self.manifest is not None  # noqa: S101 - composed
        offer = SpoolOffer(capture.partial.path, raw, self.manifest)
        run = attempts.Run(self.wanted.reach, self.machine.listener, vigil)
        streamed = self.far.sent_bytes if self.far is not None else 0
        place = self._place_there
        try:
            arrival = self.there.store.receive(place, raw)
            arrival.durable = False
            try:
                run.through(attempts.Ends(offer, arrival, self.there.store))
            finally:
                arrival.close()
        except (LinkLost, NotReached) as lost:
            raise TransferFailed(
                f"the connection to {self.there.where} was lost: {lost}", "repeat the command"
            ) from None
        self.arrived |= run.data(offer, f"{self.there.where}:{place}", "")
        self.arrived["bytes_sent"] += streamed
        self.arrived["bytes_skipped"] -= min(streamed, self.arrived["bytes_skipped"])
        self.arrived["connections"] = max(self.arrived["connections"], self.far.count if self.far is not None else 0)
        return raw

    @property
    def _place_there(self) -> str:
        return str(Path(self.terms.directory or INCOMING_PLACE) / self.terms.name)

    def _let_it_run(self, owner: OwnerHandle, capture: Capture) -> None:
        self.machine.listener(Event("go", "begin"))
        self._job_is_on("unknown", f"the job is given to {self.there.where}")
        self.given, begun = "hold", time.monotonic()
        verdict = self.there.go(self.terms.transaction, self.interruption.check_signals)
        if verdict == "cancelled":
            self.given = "resume"
            self._job_is_on(self._here, f"the job is on {self._here}: its copy on {self.there.where} never ran")
            raise DumpFailed(f"the copy on {self.there.where} ended before it ran", "repeat the command")
        if verdict is None:
            raise self._unanswered()
        if verdict == "ended":
            raise RestoredUnhealthy(f"the job came alive on {self.there.where} and has ended there", self._ways())
        self.given, self.published = "end", True
        self.arrived["seconds"] = {**self.arrived["seconds"], "go": time.monotonic() - begun}
        self.downtime_seconds = time.monotonic() - capture.said["frozen_since"]
        tell(owner, "runs-there")
        self._job_is_on(self.there.name, f"the job is on {self.there.where}, and runs")

    def _watch(self, owner: OwnerHandle) -> None:
        """How it does there. A link that is lost now costs only this look."""
        try:
            seen = self.there.watch(lambda: None)
        except (GpuckptError, ValueError) as trouble:
            self.notes.append(f"the job runs on {self.there.where}; it could not be watched there: {trouble}")
            return
        self.arrived |= {**seen.data, "seconds_there": seen.seconds}
        self.notes += seen.notes
        if seen.trouble is not None:
            self.given, self.published = "hold", False
            raise RestoredUnhealthy(f"on {self.there.where}: {seen.trouble}", self._ways())
        self._finish(owner)

    def _finish(self, _owner: OwnerHandle) -> None:
        try:
            self.there.finish(self.terms, lambda: None)
        except GpuckptError as error:
            self.notes.append(f"{self._place_there} stays on {self.there.where}: {error}")

    def _unanswered(self) -> GoUnanswered:
        return GoUnanswered(
            f"{self.there.where} does not answer; the job may run there, and is held here", self._ways()
        )

    def _ways(self) -> str:
        """Both ways out, as commands."""
        pids = " ".join(str(pid) for pid in self.facts.tree.pids)
        root = self.facts.tree.root.pid
        return (
            f"look at process {root} on {self.there.where}; where it runs there, end it here: `kill -KILL {pids}`; "
            f"where it does not, resume it here: `gpuckpt restore --tree {root}`"
        )

    def _abort(self, owner: OwnerHandle, trouble: Exception) -> Report:
        if self.given != "resume":
            return self._hold(owner, trouble)
        self.there.close()
        return super()._abort(owner, trouble)

    def settle_there(self, error: GpuckptError) -> None:
        """After a failure: an image there is of no use where the tree goes on here, and all there is where it ended.

        A host that is out of reach keeps it (flows/tidying.py).
        """
        if error.process == "gone" and self.arrived and self.given == "resume":
            error.hint = f"its image is on {self.there.where}: run there `gpuckpt restore {self._place_there}`"
        goes_on = error.process == "running" or (error.process == "untouched" and self.given == "resume")
        if goes_on and (self.seed or self.files_sent or self.arrived):
            self.there.close()
            discard_there(self.wanted.reach, self.terms)

    def _hold(self, owner: OwnerHandle, trouble: Exception) -> Report:
        """Leave it held here, out of CRIU's hands. Raises the trouble."""
        self.tree_is_held = True
        error = trouble if isinstance(trouble, GpuckptError) else self._unanswered()
        try:
            tell(owner, "hold")
            said = hear(owner, ("held",), self.machine)
            seen = seen_of(said)
        except (OwnerGone, OwnerSays):
            seen = ()
            with contextlib.suppress(TreeHeld):
                self._repair(error)
        if any(one.state == "running" for one in seen):
            error.hint = f"seen here: {words_for_seen(seen)}; {error.hint}"
        error.process = "frozen"
        raise error

    def _report(self, done: dict[str, Any], process: ProcessState) -> Report:
        """What the dump says, and the transfer, and the copy."""
        dumped = super()._report(done, process)
        there = self.arrived.pop("seconds_there", None) or {}
        notes = (*dumped.data["notes"], *self.arrived.pop("notes", ()), *self.notes)
        data = {
            **dumped.data,
            **self.arrived,
            "to": self.there.where,
            "seconds": {**dumped.data["seconds"], **self.arrived.get("seconds", {}), **there},
            "downtime_seconds": self.downtime_seconds,
            "image": str(self.wanted.keep_image) if self.kept else None,
            "notes": list(dict.fromkeys(notes)),
        }
        if not self.terms.directory:
            data["location"] = None
        if self.seed is not None:
            data["seed"] = self.seed.data
        if self.files_sent is not None:
            data["files_sent_before"] = self.files_sent
        return Report("migrate", "ok", "restored", data, self.findings)

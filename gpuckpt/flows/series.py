"""dump --into: the next image of a series, the link to it, and which older ones go.

    lock the series -> remove what killed runs left -> newest whole image as base -> dump
        -> (published, before the tree ends) DIR/latest leads to it -> look at it -> older ones go by the rules
        -> --push: a copy on another host, where older ones go by the same rules

steps, and what kill -9 at each leaves, besides what flows/dump.py says of the dump itself:

1. lock                 nothing; the lock ends with the process
2. dump                 NAME-STAMP.partial, which the next dump into the series removes
3. after the rename     DIR/latest is one image behind; the tree has not ended yet, it goes on
4. after the link       older images that should have gone; the next dump removes them
5. in the middle of it  NAME-STAMP.partial of an older image, as 2
6. while it is pushed   NAME-STAMP.partial on the other host, from which `gpuckpt push` goes on
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpuckpt.flows import capturing, gather
from gpuckpt.flows import dump as dumping
from gpuckpt.flows.pruning import Pruning, warning
from gpuckpt.model import series
from gpuckpt.model.errors import DumpFailed, Refused, TransferFailed, in_words
from gpuckpt.model.report import Finding, Report
from gpuckpt.stores import directory
from gpuckpt.stores import series as stored
from gpuckpt.system import procfs

if TYPE_CHECKING:
    from gpuckpt.flows.interruption import Interruption
    from gpuckpt.flows.machine import Machine
    from gpuckpt.model.requests import DumpRequest, Into
    from gpuckpt.stores.series import Found

ENCRYPTED = "job"
"""In the place of the program's name: whoever can list the directory reads names of images."""


def dump(request: DumpRequest, into: Into, machine: Machine, interruption: Interruption) -> Report:
    """Save the tree as the next image of a series. Raises as dumping.dump, Busy where the last run still works."""
    name = into.name or default_name(request)
    stored.refuse_other_latest(into.directory)
    work = SeriesDump(request, into, name, machine, interruption)
    if request.dry_run:
        return work.perform()
    with stored.alone(into.directory, name):
        work.notes += stored.clear_partials(into.directory, name)
        return work.perform()


def default_name(request: DumpRequest) -> str:
    """The name of a series that nobody named; an encrypted one says nothing of the job. Raises NotFound."""
    process = gather.identify(request.pid)
    return series.default_name(ENCRYPTED if request.encrypt_to else procfs.program_of(process.pid), request.pid)


@dataclass
class SeriesDump:
    """One dump into a series, whose lock is held."""

    request: DumpRequest
    into: Into
    name: str
    machine: Machine
    interruption: Interruption
    notes: list[str] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)
    pushed: dict[str, Any] = field(default_factory=dict)
    """Where the copy on another host is, and what it cost."""
    damaged_base: str = ""
    """The image that should have been the base and whose bytes are not what they were: it counts for nothing."""
    full: str = ""
    """Why the image shares nothing with older ones; empty where it may."""

    @property
    def place(self) -> Path:
        """The directory of the series."""
        return self.into.directory

    def perform(self) -> Report:
        """Dump, link, prune. What goes wrong once the image is there is a warning."""
        base = self._base()
        request = replace(self.request, image=self.place / self._next_name(), base=base)
        report = dumping.dump(
            request,
            self.machine,
            self.interruption,
            lambda: self._link(request.image.name),
        )
        if report.outcome == "ok":
            self._judge_base(base, report.data.get("notes", ()))
            self._prune(request.image.name)
            report = self._push(report)
        return self._finished(report, base)

    def _link(self, image: str) -> None:
        """Before the tree ends: with a link to an older image its newest work would be lost to who restores by it."""
        try:
            stored.point_latest(self.place, self.name, image)
        except OSError as error:
            why = f"{self.place / series.LATEST} could not be made to lead to it: {in_words(error)}"
            raise DumpFailed(why, "mend that, then dump again") from None

    def _next_name(self) -> str:
        try:
            return series.next_name(self.name, stored.names_in(self.place), time.time())
        except series.ClockAtEnd:
            raise Refused(
                f"no name comes after the last image of the series {self.place / self.name}",
                "move that image away: its name is of a time that no clock shows",
            ) from None

    def _base(self) -> Path | None:
        """The newest whole image, unless a full one is wanted or due."""
        if self.request.plain:
            self.full = "--plain"
        elif not self.into.use_base:
            self.full = "--no-base"
        if self.full:
            return None
        newest = self._newest_whole()
        if newest is None:
            self.full = "there is no whole image in the series yet"
        elif series.full_is_due(newest.member, self.into.full_every_seconds, time.time()):
            self.full = "the last full image is older than --full-every"
        return None if self.full or newest is None else newest.path

    def _newest_whole(self) -> Found | None:
        for name in reversed(stored.members_in(self.place, self.name)):
            found = stored.look(self.place / name)
            if not found.damage:
                return found
            self.findings.append(_damaged(f"{found.path}: {found.damage}", found.path))
        return None

    def _judge_base(self, base: Path | None, notes: list[str]) -> None:
        if base is None:
            return
        unused = next((note for note in notes if note.startswith(capturing.base_not_used(base))), None)
        if unused is not None:
            self.full, self.damaged_base = unused, base.name
            self.findings.append(_damaged(f"{unused}; the new image is a full one", base))
            return
        unshared = (note for note in notes if note.startswith(capturing.base_shares_nothing(base)))
        self.full = next(unshared, self.full)

    def _prune(self, newest: str) -> None:
        pruning = Pruning(self.place, self.name, self.into.rules, lambda: self.interruption.caught is None)
        pruning.prune(newest, self.damaged_base)
        self.removed = pruning.removed
        self.notes += pruning.notes
        self.findings += pruning.findings

    def _push(self, report: Report) -> Report:
        """The image to the other host; that it did not come there costs nothing here, and is said by the status."""
        reach = self.into.push
        if reach is None:
            return report
        from gpuckpt.flows import farseries  # noqa: PLC0415  most dumps go nowhere

        try:
            self.pushed = farseries.push(Path(report.data["image"]), reach, self.machine, self.interruption)
        except TransferFailed as error:
            error.process = report.process
            return replace(report, outcome="partial", error=error)
        removed, notes, findings = farseries.settle(self.pushed, reach, self.name, self.into.rules)
        self.pushed["removed"] = removed
        self.notes += notes
        self.findings += findings
        return report

    def _finished(self, report: Report, base: Path | None) -> Report:
        done = report.outcome in ("ok", "partial")
        about: dict[str, Any] = {
            "directory": str(self.place),
            "name": self.name,
            "latest": directory.latest_in(self.place) or None,
            "base": base.name if base is not None and not self.full else None,
            "full": self.full or None,
            "removed": self.removed,
            "pushed": self.pushed or None,
        }
        data = {**report.data, "series": about}
        if done:
            data["notes"] = [*report.data.get("notes", ()), *self.notes]
        return replace(report, data=data, findings=(*report.findings, *(self.findings if done else ())))


def _damaged(found: str, path: Path) -> Finding:
    hint = f"gpuckpt inspect --verify {path} says what is wrong; remove it if it is worth nothing"
    return warning("series-damaged", "a whole newest image", found, hint)

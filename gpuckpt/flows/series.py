"""dump --into: the next image of a series, the link to it, and which older ones go.

    lock the series -> remove what killed runs left -> newest whole image as base -> dump
        -> (published, before the tree ends) DIR/latest leads to it -> look at it -> older ones go by the rules

steps, and what kill -9 at each leaves, besides what flows/dump.py says of the dump itself:

1. lock                 nothing; the lock ends with the process
2. dump                 NAME-STAMP.partial, which the next dump into the series removes
3. after the rename     DIR/latest is one image behind; the tree has not ended yet, it goes on
4. after the link       older images that should have gone; the next dump removes them
5. in the middle of it  NAME-STAMP.partial of an older image, as 2
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from gpuckpt.flows import capturing, gather
from gpuckpt.flows import dump as dumping
from gpuckpt.model import series
from gpuckpt.model.errors import Busy, GpuckptError, Refused, in_words
from gpuckpt.model.report import Finding, Report
from gpuckpt.stores import series as stored
from gpuckpt.system import procfs

if TYPE_CHECKING:
    from pathlib import Path

    from gpuckpt.flows.interruption import Interruption
    from gpuckpt.flows.machine import Machine
    from gpuckpt.model.requests import DumpRequest, Into
    from gpuckpt.stores.series import Found


def dump(request: DumpRequest, into: Into, machine: Machine, interruption: Interruption) -> Report:
    """Save the tree as the next image of a series. Raises as dumping.dump, Busy where the last run still works."""
    name = into.name or series.default_name(procfs.program_of(gather.identify(request.pid).pid), request.pid)
    stored.refuse_other_latest(into.directory)
    work = SeriesDump(request, into, name, machine, interruption)
    if request.dry_run:
        return work.perform()
    with stored.alone(into.directory, name):
        work.notes += stored.clear_partials(into.directory, name)
        return work.perform()


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
            lambda: stored.point_latest(self.place, self.name, request.image.name),
        )
        if report.outcome == "ok":
            self._judge_base(base, report.data.get("notes", ()))
            self._prune(request.image.name)
        return self._finished(report, base)

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
            self._warn("series-damaged", "a whole newest image", f"{found.path}: {found.damage}", _look_at(found.path))
        return None

    def _judge_base(self, base: Path | None, notes: list[str]) -> None:
        unused = next((note for note in notes if base and note.startswith(capturing.base_not_used(base))), None)
        if base is not None and unused is not None:
            self.full, self.damaged_base = unused, base.name
            found = f"{unused}; the new image is a full one"
            self._warn("series-damaged", "a whole newest image", found, _look_at(base))

    def _warn(self, check: str, expected: str, found: str, hint: str) -> None:
        self.findings.append(Finding(check, "fail", "warn", expected, found, hint))

    def _prune(self, newest: str) -> None:
        rules = self.into.rules
        if rules == series.Rules():
            return
        try:
            found = [stored.look(self.place / name) for name in stored.members_in(self.place, self.name)]
            whole = {one.name: one for one in found if not one.damage and one.name != self.damaged_base}
            if newest not in whole:
                self._warn("series-prune", f"{newest} is whole", "it is not; no image was removed", "dump again")
                return
            self._remove_what_goes(whole)
        except (OSError, GpuckptError) as error:
            self._warn("series-prune", "older images go by the rules", in_words(error), f"look at {self.place}")

    def _remove_what_goes(self, whole: dict[str, Found]) -> None:
        """One after the other, oldest first; after one that is in use it is thought over again."""
        room = stored.space(self.place)
        # The link leads to the newest of all series here: never to one of these, unless somebody has set it.
        untouchable = frozenset({stored.latest_in(self.place)})
        while (plan := self._going(whole, room, untouchable)).names and self.interruption.caught is None:
            name = plan.names[0]
            gained = whole[name].bytes_unshared
            try:
                stored.remove(self.place / name)
            except Busy as error:
                self.notes.append(f"{error.message}: it stays until the next dump")
                untouchable |= {name}
                continue
            self.removed.append(name)
            room = replace(room, free_bytes=room.free_bytes + gained)
            _forget(whole, name)
        if plan.missing_bytes:
            found = f"{plan.missing_bytes} bytes less, and no older image whose removal frees any"
            self._warn(
                "series-free", "as much free as --min-free says", found, f"make room on the disk of {self.place}"
            )

    def _going(self, whole: dict[str, Found], room: series.Space, untouchable: frozenset[str]) -> series.Going:
        members = [one.member for one in whole.values()]
        return series.going(members, self.into.rules, room, time.time(), untouchable)

    def _finished(self, report: Report, base: Path | None) -> Report:
        done = report.outcome == "ok"
        about: dict[str, Any] = {
            "directory": str(self.place),
            "name": self.name,
            "latest": stored.latest_in(self.place) or None,
            "base": base.name if base is not None and not self.full else None,
            "full": self.full or None,
            "removed": self.removed,
        }
        data = {**report.data, "series": about}
        if done:
            data["notes"] = [*report.data.get("notes", ()), *self.notes]
        return replace(report, data=data, findings=(*report.findings, *(self.findings if done else ())))


def _forget(whole: dict[str, Found], name: str) -> None:
    """An image has gone: its files have as many names less."""
    gone = whole.pop(name).files
    for key, one in whole.items():
        files = {
            inode: replace(file, links=file.links - gone[inode].names) if inode in gone else file
            for inode, file in one.files.items()
        }
        whole[key] = replace(one, files=files)


def _look_at(path: Path) -> str:
    return f"gpuckpt inspect --verify {os.fspath(path)} says what is wrong; remove it if it is worth nothing"

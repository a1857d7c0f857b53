"""Which images of a series go, and that they go: here after a dump, on another host after a push."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from gpuckpt.model import series
from gpuckpt.model.errors import Busy, GpuckptError, in_words
from gpuckpt.model.report import Finding
from gpuckpt.stores import directory
from gpuckpt.stores import series as stored

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from gpuckpt.model.series import Rules
    from gpuckpt.stores.series import Found


def warning(check: str, expected: str, found: str, hint: str) -> Finding:
    """Something that whoever reads it must act on, and that costs nothing of what was asked for."""
    return Finding(check, "fail", "warn", expected, found, hint)


@dataclass
class Pruning:
    """One pass over a series, whose lock is held."""

    place: Path
    name: str
    rules: Rules
    may_go_on: Callable[[], bool] = lambda: True
    removed: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)

    def prune(self, newest: str, uncounted: str = "") -> None:
        """Remove what goes by the rules, if the newest is whole. Raises nothing: what goes wrong is a finding.

        `uncounted` is an image that looks whole and is known not to be.
        """
        if self.rules == series.Rules():
            return
        try:
            found = [stored.look(self.place / name) for name in stored.members_in(self.place, self.name)]
            whole = {one.name: one for one in found if not one.damage and one.name != uncounted}
            if newest in whole:
                self._remove_what_goes(whole)
            else:
                self._warn("series-prune", f"{newest} is whole", "it is not; no image was removed", "dump again")
        except (OSError, GpuckptError) as error:
            self._warn("series-prune", "older images go by the rules", in_words(error), f"look at {self.place}")

    def _warn(self, check: str, expected: str, found: str, hint: str) -> None:
        self.findings.append(warning(check, expected, found, hint))

    def _remove_what_goes(self, whole: dict[str, Found]) -> None:
        """The oldest first; after one that is in use it is thought over again."""
        room = stored.space(self.place)
        # The link leads to the newest of all series here: never to one of these, unless somebody has set it.
        untouchable = {directory.latest_in(self.place)}
        plan = self._plan(whole, room, untouchable)
        waiting = list(plan.names)
        while waiting and self.may_go_on():
            name = waiting.pop(0)
            try:
                stored.remove(self.place / name)
            except Busy as error:
                self.notes.append(f"{error.message}: it stays until the next dump")
                untouchable.add(name)
                plan = self._plan(whole, room, untouchable)
                waiting = list(plan.names)
                continue
            self.removed.append(name)
            # Counted, not asked for: some file systems free what was removed much later.
            room = replace(room, free_bytes=room.free_bytes + whole[name].bytes_unshared)
            _forget(whole, name)
        if plan.missing_bytes:
            found = f"{plan.missing_bytes >> 20} MiB less, and no older image whose removal frees any"
            self._warn(
                "series-free", "as much free as --min-free says", found, f"make room on the disk of {self.place}"
            )

    def _plan(self, whole: dict[str, Found], room: series.Space, untouchable: set[str]) -> series.Going:
        members = [one.member for one in whole.values()]
        return series.going(members, self.rules, room, time.time(), frozenset(untouchable))


def _forget(whole: dict[str, Found], name: str) -> None:
    """An image has gone: its files have as many names less."""
    gone = whole.pop(name).files
    for key, one in whole.items():
        files = {
            inode: replace(file, links=file.links - gone[inode].names) if inode in gone else file
            for inode, file in one.files.items()
        }
        whole[key] = replace(one, files=files)

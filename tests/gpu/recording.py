"""What a run of tests/gpu proved, failed to prove, or did not try: one JSON file per pytest process, one entry per row."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

MOST_WORDS = 3000
ROW = pytest.StashKey[str]()
"""The row that a test is about, where it has said so."""


class Recorder:
    """record(row, outcome=…, **figures): an entry, written at once, so that a killed run loses nothing."""

    def __init__(self, directory: Path) -> None:
        self._entries: list[dict[str, Any]] = []
        self._begun: dict[str, dict[str, Any]] = {}
        self.path = directory / f"rows-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.json"

    def begin(self, item: pytest.Item, row: str, **figures: object) -> dict[str, Any]:
        """The row a test is about: what it puts into the answer is recorded even if the test fails."""
        item.stash[ROW] = row
        self._begun[row] = dict(figures)
        return self._begun[row]

    def __call__(self, row: str, **figures: object) -> None:
        """One row's result."""
        entry = {"row": row, "time": time.strftime("%Y-%m-%d %H:%M:%S"), **self._begun.pop(row, {}), **figures}
        self._entries.append(entry)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(self._entries, indent=1, default=str))
        print("ROW", json.dumps(entry, default=str))

    def note(self, item: pytest.Item, report: pytest.TestReport) -> None:
        """A test that failed or was skipped, by the row it is about, else by its name."""
        if not (report.failed or report.skipped):
            return
        words = report.longrepr[2] if isinstance(report.longrepr, tuple) else _why(report)
        outcome = "failed" if report.failed else "skipped"
        self(_row_of(item), outcome=f"{outcome}: {words.removeprefix('Skipped: ')[:MOST_WORDS]}", phase=report.when)


def _why(report: pytest.TestReport) -> str:
    """The message of what was raised, without the source around it."""
    crash = getattr(report.longrepr, "reprcrash", None)
    return crash.message if crash is not None else str(report.longrepr)


def _row_of(item: pytest.Item) -> str:
    callspec = getattr(item, "callspec", None)
    row = callspec.params.get("row") if callspec is not None else None
    return item.stash.get(ROW, getattr(row, "name", item.name))

"""--metrics-file: what came of a run, for Prometheus. It never changes what came of it."""

from __future__ import annotations

import shlex
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from gpuckpt.model import metrics
from gpuckpt.model.errors import GpuckptError, in_words
from gpuckpt.model.metrics import RunFigures
from gpuckpt.model.report import Finding, Report
from gpuckpt.system.files import replace_file

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

READABLE = 0o644
"""node_exporter runs as a user of its own."""
EXPECTED = "a metrics file that can be written"


def measured(path: Path | None, command: str, name: str, act: Callable[[], Report], *, dry_run: bool = False) -> Report:
    """The report of `act`, noted in a metrics file where one is named; a file that cannot be written is a warning.

    A dry run writes none, and says where its directory is missing.
    """
    if path is None:
        return act()
    if dry_run:
        return _with_warning(act(), *_place_of(path))
    try:
        report = act()
    except Exception:
        _note(path, RunFigures(command, name, time.time(), GpuckptError.status, success=False))
        raise
    return _with_warning(report, *_note(path, _figures(command, name, report)))


def _with_warning(report: Report, trouble: str, hint: str) -> Report:
    if not trouble:
        return report
    finding = Finding("metrics-file", "fail", "warn", EXPECTED, trouble, hint)
    return replace(report, findings=(*report.findings, finding))


def _place_of(path: Path) -> tuple[str, str]:
    """What is wrong with where the file goes, and what to do; both empty where it can go there."""
    if path.parent.is_dir():
        return "", ""
    hint = f"if it is the right one: mkdir -p {shlex.quote(str(path.parent))}; else correct --metrics-file"
    return f"there is no directory {path.parent}, so no figures are written", hint


def _figures(command: str, name: str, report: Report) -> RunFigures:
    data = report.data
    return RunFigures(
        command,
        name,
        ended=time.time(),
        exit_status=report.exit_status,
        success=report.outcome == "ok",
        seconds=data.get("seconds") or {},
        frozen_seconds=data.get("frozen_seconds"),
        bytes_raw=data.get("bytes_raw"),
        bytes_stored=data.get("bytes_stored"),
        bytes_shared=data.get("bytes_shared"),
    )


def _note(path: Path, figures: RunFigures) -> tuple[str, str]:
    """Put the figures into the file; returns what went wrong and what to do, both empty where nothing did."""

    def change(old: bytes) -> bytes:
        return metrics.updated(old.decode("utf-8", "replace"), figures).encode()

    try:
        replace_file(path, change, READABLE)
    except metrics.NotOurs as error:
        return f"{path} holds something else and was left alone: {error}", "name another file with --metrics-file"
    except OSError as error:
        look = f"look at it: ls -ld {shlex.quote(str(path.parent))}"
        return _place_of(path) if not path.parent.is_dir() else (f"{path} was not written: {in_words(error)}", look)
    return "", ""

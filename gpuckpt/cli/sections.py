"""Which lists follow the first screen of inspect, or stand in its place."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from gpuckpt.cli.findings import add_findings
from gpuckpt.cli.manner import SECTIONS, Manner
from gpuckpt.cli.sheet import Sheet
from gpuckpt.model.report import Report

Drawings = Mapping[str, Callable[[], None]]
"""What draws each section that a kind of thing has."""


def has_first_screen(manner: Manner) -> bool:
    """Who asks for a list wants that list."""
    return manner.everything or not manner.sections


def add_sections(sheet: Sheet, report: Report, manner: Manner, drawings: Drawings) -> None:
    """The lists that are wanted; after the first screen the checks too, and which lists there are."""
    for name in SECTIONS:
        if name in drawings and (manner.everything or name in manner.sections):
            drawings[name]()
    if has_first_screen(manner):
        add_findings(sheet, report.findings, passes=manner.verbose or manner.everything)
    if not (manner.sections or manner.everything):
        sheet.foot(f"More: {' '.join(f'--{name}' for name in SECTIONS if name in drawings)}, or --all")

"""How a flow's failure becomes a report."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpuckpt.model.errors import Busy, GpuckptError, MachineLacks, NotFound, Refused
from gpuckpt.model.report import Outcome, Report

if TYPE_CHECKING:
    from collections.abc import Callable

REFUSALS = (MachineLacks, Refused, NotFound, Busy)


def reported(command: str, act: Callable[[], Report]) -> Report:
    """What `act` returns, or a report of its failure."""
    try:
        return act()
    except GpuckptError as error:
        refused = isinstance(error, REFUSALS) and error.process == "untouched"
        outcome: Outcome = "refused" if refused else "failed"
        return Report(command, outcome, error.process, {}, error.findings, error)

"""How a flow's failure becomes a report."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

from gpuckpt.model.errors import Busy, GpuckptError, Interrupted, MachineLacks, NotFound, Refused
from gpuckpt.model.report import Outcome, Report

if TYPE_CHECKING:
    from collections.abc import Callable

    from gpuckpt.flows.interruption import Interruption

REFUSALS = (MachineLacks, Refused, NotFound, Busy)


def reported(command: str, act: Callable[[], Report], interruption: Interruption | None = None) -> Report:
    """What `act` returns, or a report of its failure.

    What this machine seems to lack after a signal is told as the signal: it may have ended the very program that was
    asked (one that has just been forked is still in our process group). Any other failure has its own cause.
    """
    try:
        report = act()
    except GpuckptError as error:
        refused = isinstance(error, REFUSALS) and error.process == "untouched"
        outcome: Outcome = "refused" if refused else "failed"
        report = Report(command, outcome, error.process, {}, error.findings, error)
    is_lack = report.outcome == "refused" and isinstance(report.error, MachineLacks)
    if is_lack and interruption is not None and interruption.caught is not None:
        number = interruption.caught
        why = f"broken off: {signal.Signals(number).name} came; nothing was touched"
        return Report(command, "failed", "untouched", error=Interrupted(number, why, process="untouched"))
    return report

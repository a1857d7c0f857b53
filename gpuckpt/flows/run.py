"""The doors of the flows: each verb with the real machine, signals watched, errors turned into a report."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpuckpt.flows import describe as describing
from gpuckpt.flows import dump as dumping
from gpuckpt.flows import repair as repairing
from gpuckpt.flows import restore as restoring
from gpuckpt.flows.interruption import watching
from gpuckpt.flows.machine import this_machine
from gpuckpt.model.errors import Busy, GpuckptError, MachineLacks, NotFound, Refused
from gpuckpt.model.report import Event, Outcome, Report

if TYPE_CHECKING:
    from collections.abc import Callable

    from gpuckpt.model.requests import DumpRequest, InspectRequest, RepairRequest, RestoreRequest

    Listener = Callable[[Event], None]

REFUSALS = (MachineLacks, Refused, NotFound, Busy)


def dump(request: DumpRequest, listener: Listener) -> Report:
    """Process tree -> image."""
    with watching(request.timeout_seconds) as interruption:
        return _reported("dump", lambda: dumping.dump(request, this_machine(listener), interruption))


def restore(request: RestoreRequest, listener: Listener) -> Report:
    """Image -> running tree."""
    with watching(request.timeout_seconds) as interruption:
        return _reported("restore", lambda: restoring.restore(request, this_machine(listener), interruption))


def repair(request: RepairRequest, listener: Listener) -> Report:
    """Repair a held tree."""
    with watching(request.timeout_seconds):
        return _reported("restore", lambda: repairing.repair(request, this_machine(listener)))


def inspect(request: InspectRequest, listener: Listener) -> Report:
    """Say what a target is."""
    with watching(None) as interruption:
        return _reported("inspect", lambda: describing.inspect(request, this_machine(listener), interruption))


def _reported(command: str, act: Callable[[], Report]) -> Report:
    try:
        return act()
    except GpuckptError as error:
        refused = isinstance(error, REFUSALS) and error.process == "untouched"
        outcome: Outcome = "refused" if refused else "failed"
        return Report(command, outcome, error.process, {}, error.findings, error)

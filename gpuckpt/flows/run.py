"""The doors of the flows: each verb with the real machine, signals watched, errors turned into a report."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpuckpt.flows import describe as describing
from gpuckpt.flows import dump as dumping
from gpuckpt.flows import repair as repairing
from gpuckpt.flows import restore as restoring
from gpuckpt.flows.interruption import watching
from gpuckpt.flows.machine import this_machine
from gpuckpt.flows.reporting import reported
from gpuckpt.system import limits

if TYPE_CHECKING:
    from collections.abc import Callable

    from gpuckpt.model.report import Event, Report
    from gpuckpt.model.requests import (
        DumpRequest,
        InspectRequest,
        RepairRequest,
        RestoreRequest,
    )

    Listener = Callable[[Event], None]


def dump(request: DumpRequest, listener: Listener) -> Report:
    """Process tree -> image."""
    with watching(request.timeout_seconds) as interruption:

        def act() -> Report:
            limits.require_descriptors()
            return dumping.dump(request, this_machine(listener), interruption)

        return reported("dump", act)


def restore(request: RestoreRequest, listener: Listener) -> Report:
    """Image -> running tree."""
    with watching(request.timeout_seconds) as interruption:

        def act() -> Report:
            limits.require_descriptors()
            return restoring.restore(request, this_machine(listener), interruption)

        return reported("restore", act)


def repair(request: RepairRequest, listener: Listener) -> Report:
    """Repair a held tree."""
    with watching(request.timeout_seconds):
        return reported("restore", lambda: repairing.repair(request, this_machine(listener)))


def inspect(request: InspectRequest, listener: Listener) -> Report:
    """Say what a target is."""
    with watching(None) as interruption:
        return reported("inspect", lambda: describing.inspect(request, this_machine(listener), interruption))

"""The doors of the flows: each verb with the real machine, signals watched, errors turned into a report.

Each loads its own flow alone: the command line has loaded it already (cli/session.py), others none.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from gpuckpt.flows import measuring, treename
from gpuckpt.flows.interruption import watching
from gpuckpt.flows.machine import this_machine
from gpuckpt.flows.reporting import reported
from gpuckpt.model import series as series_names
from gpuckpt.system import limits

if TYPE_CHECKING:
    from collections.abc import Callable

    from gpuckpt.model.report import Event, Report
    from gpuckpt.model.requests import (
        DumpRequest,
        InspectRequest,
        Into,
        RepairRequest,
        RestoreRequest,
    )

    Listener = Callable[[Event], None]


def dump(request: DumpRequest, listener: Listener) -> Report:
    """Process tree -> image."""
    from gpuckpt.flows import dump as dumping  # noqa: PLC0415

    with watching(request.timeout_seconds) as interruption:

        def act() -> Report:
            limits.require_descriptors()
            machine = this_machine(listener)
            named = replace(request, pid=treename.pid_of(request.pid, request.pid_file, request.unit))
            if request.into is not None:
                from gpuckpt.flows import series  # noqa: PLC0415

                return series.dump(named, request.into, machine, interruption)
            return dumping.dump(named, machine, interruption)

        name, say = _name(request.image, request.into), lambda: reported("dump", act, interruption)
        return measuring.measured(request.metrics_file, "dump", name, say, dry_run=request.dry_run)


def _name(image: Path, into: Into | None = None) -> str:
    """What the figures of a run stand under: the name of the series, else that of its directory or of the image."""
    member = series_names.parse(image.name)
    return (into.name if into is not None else None) or (member[0] if member is not None else image.name)


def restore(request: RestoreRequest, listener: Listener) -> Report:
    """Image -> running tree."""
    from gpuckpt.flows import restore as restoring  # noqa: PLC0415

    with watching(request.timeout_seconds) as interruption:

        def act() -> Report:
            limits.require_descriptors()
            return restoring.restore(request, this_machine(listener), interruption)

        image = request.image if request.reach is None else Path(request.reach.location.path)
        name, say = _name(image), lambda: reported("restore", act, interruption)
        return measuring.measured(request.metrics_file, "restore", name, say, dry_run=request.dry_run)


def repair(request: RepairRequest, listener: Listener) -> Report:
    """Repair a held tree."""
    from gpuckpt.flows import repair as repairing  # noqa: PLC0415

    with watching(request.timeout_seconds) as interruption:
        return reported("restore", lambda: repairing.repair(request, this_machine(listener)), interruption)


def inspect(request: InspectRequest, listener: Listener) -> Report:
    """Say what a target is."""
    from gpuckpt.flows import describe as describing  # noqa: PLC0415

    with watching(None) as interruption:
        machine = this_machine(listener)
        return reported("inspect", lambda: describing.inspect(request, machine, interruption), interruption)

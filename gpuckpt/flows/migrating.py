"""The door of migrate: apart from the others, so that they do not load what speaks to other hosts."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from gpuckpt.flows import measuring, treename
from gpuckpt.flows import migrate as flow
from gpuckpt.flows.interruption import watching
from gpuckpt.flows.machine import this_machine
from gpuckpt.flows.reporting import reported
from gpuckpt.system import limits, procfs

if TYPE_CHECKING:
    from collections.abc import Callable

    from gpuckpt.model.report import Event, Report
    from gpuckpt.model.requests import MigrateRequest


def migrate(request: MigrateRequest, listener: Callable[[Event], None]) -> Report:
    """Process tree -> another host."""
    with watching(request.timeout_seconds) as interruption:

        def act() -> Report:
            limits.require_descriptors()
            pid = treename.pid_of(request.pid, request.pid_file, request.unit)
            return flow.migrate(replace(request, pid=pid), this_machine(listener), interruption)

        name, say = _name(request), lambda: reported("migrate", act, interruption)
        return measuring.measured(request.metrics_file, "migrate", name, say, dry_run=request.dry_run)


def _name(request: MigrateRequest) -> str:
    """What the figures of a run stand under: unit, pid file or program, which stay when the pid does not."""
    by_file = request.pid_file.stem if request.pid_file is not None else ""
    return request.unit or by_file or procfs.program_of(request.pid) or str(request.pid)

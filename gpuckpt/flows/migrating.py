"""The door of migrate: apart from the others, so that they do not load what speaks to other hosts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpuckpt.flows import migrate as flow
from gpuckpt.flows.interruption import watching
from gpuckpt.flows.machine import this_machine
from gpuckpt.flows.reporting import reported
from gpuckpt.system import limits

if TYPE_CHECKING:
    from collections.abc import Callable

    from gpuckpt.model.report import Event, Report
    from gpuckpt.model.requests import MigrateRequest


def migrate(request: MigrateRequest, listener: Callable[[Event], None]) -> Report:
    """Process tree -> another host."""
    with watching(request.timeout_seconds) as interruption:

        def act() -> Report:
            limits.require_descriptors()
            return flow.migrate(request, this_machine(listener), interruption)

        return reported("migrate", act)

"""One run of a flow: who listens while it works, and how its report comes out.

The listener hands each event to a thread of its own: a terminal stopped with Ctrl-S or a stalled
reader of stderr must never hold up a dump, for the job is frozen meanwhile.
"""

from __future__ import annotations

import importlib
import signal
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING

from gpuckpt.cli import origins
from gpuckpt.cli.failing import on_signals
from gpuckpt.cli.manner import Manner

if TYPE_CHECKING:
    from gpuckpt.model.report import Event, Report

    Listener = Callable[[Event], None]


def carry_out(
    manner: Manner,
    act: Callable[[Listener], Report],
    flows: str = "run",
    within: Callable[[Callable[[], int]], int] = lambda work: work(),
    *,
    looks_at_gpus: bool = False,
) -> int:
    """Run a flow, whose module among the flows is named, show its report, and give the exit status.

    `within` is given all that, and gives its status: where it gives up rights for it. `looks_at_gpus`: before anything
    else; what has to be started for that starts while the flow is loaded.
    """
    if looks_at_gpus:
        from gpuckpt.accelerators import ACCELERATORS  # noqa: PLC0415

        for accelerator in ACCELERATORS:
            accelerator.get_ready()
    # Not earlier: --help and TAB must not load the flows. Not later: signals end in words until here.
    importlib.import_module(f"gpuckpt.flows.{flows}")
    return within(lambda: _shown(manner, act))


def _shown(manner: Manner, act: Callable[[Listener], Report]) -> int:
    from gpuckpt.cli.listening import listening  # noqa: PLC0415
    from gpuckpt.cli.render import final_status, present  # noqa: PLC0415

    with listening(manner) as listener:
        _let_signals_end_us()
        report = act(listener)
        if report.error is not None:
            origins.trace(report.error)
        _let_signals_end_us_as(final_status(report))
    status = present(report, manner)
    # All is done and said. Python would put the plain way back while it ends, and the status would say what is not so.
    on_signals(signal.SIG_IGN)
    return status


def _let_signals_end_us() -> None:
    # The flow takes signals over while it works. Before that, where "nothing was touched" could be wrong, they end
    # this process in the plain way.
    on_signals(signal.SIG_DFL)


def _let_signals_end_us_as(status: int) -> None:
    """The work is done, and no signal changes what came of it: 143 of a dump would say that the job runs on."""

    def end(_number: int, _frame: FrameType | None) -> None:
        on_signals(signal.SIG_IGN)
        raise SystemExit(status)

    on_signals(end)

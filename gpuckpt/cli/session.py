"""One run of a flow: who listens while it works, and how its report comes out.

The listener hands each event to a thread of its own: a terminal stopped with Ctrl-S or a stalled
reader of stderr must never hold up a dump, for the job is frozen meanwhile.
"""

from __future__ import annotations

import importlib
import os
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

SAY_SECONDS = 2.0
"""After a signal, for what is left to be said."""
TOGETHER_SECONDS = 0.5
"""Signals that come so soon after the first are the same wish."""


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
        words = _LastWords(final_status(report))
    status = present(report, manner)
    words.are_said()
    return status


def _let_signals_end_us() -> None:
    # The flow takes signals over while it works. Before that, where "nothing was touched" could be wrong, they end
    # this process in the plain way.
    on_signals(signal.SIG_DFL)


class _LastWords:
    """The work is done, and no signal changes what came of it: 143 of a dump would say that the job runs on.

    What is being said is said to its end; where nobody takes it, a later signal ends us, or SAY_SECONDS. Not one that
    comes with the first: to a process and to its group, TERM and HUP, a terminal that closes.
    """

    def __init__(self, status: int) -> None:
        """`status`: with which we end in any case."""
        self._status = status
        self._is_late = False
        on_signals(self._note)

    def _note(self, _number: int, _frame: FrameType | None) -> None:
        on_signals(lambda *_: None)
        self._is_late = True
        # No thread: where a limit on tasks is reached none can be started.
        signal.signal(signal.SIGALRM, self._listen_again)
        signal.setitimer(signal.ITIMER_REAL, TOGETHER_SECONDS)

    def _listen_again(self, _number: int, _frame: FrameType | None) -> None:
        on_signals(self._end)
        signal.signal(signal.SIGALRM, lambda *_: os._exit(self._status))
        signal.setitimer(signal.ITIMER_REAL, SAY_SECONDS - TOGETHER_SECONDS)

    def _end(self, _number: int, _frame: FrameType | None) -> None:
        on_signals(signal.SIG_IGN)
        raise SystemExit(self._status)

    def are_said(self) -> None:
        """Nothing ends us any more but ourselves."""
        # Python would put the plain way back while it ends, and the status would say what is not so.
        on_signals(signal.SIG_IGN)
        if self._is_late:
            signal.setitimer(signal.ITIMER_REAL, 0)

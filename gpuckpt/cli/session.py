"""One run of a flow: who listens while it works, and how its report comes out.

The listener hands each event to a thread of its own: a terminal stopped with Ctrl-S or a stalled
reader of stderr must never hold up a dump, for the job is frozen meanwhile.
"""

from __future__ import annotations

import signal
from collections.abc import Callable

from gpuckpt.cli.manner import Manner
from gpuckpt.model.report import Event, Report

Listener = Callable[[Event], None]


def carry_out(manner: Manner, act: Callable[[Listener], Report]) -> int:
    """Run the flow, show its report, and give the exit status."""
    import gpuckpt.flows.run  # noqa: F401, PLC0415  --help and TAB must not load the flows; signals in words until here
    from gpuckpt.cli.listening import listening  # noqa: PLC0415
    from gpuckpt.cli.render import present  # noqa: PLC0415

    with listening(manner) as listener:
        _let_signals_end_us()
        report = act(listener)
    return present(report, manner)


def _let_signals_end_us() -> None:
    # The flow takes signals over while it works. Before and after, where "nothing was touched" could be wrong, they
    # end this process in the plain way. Ignored ones (nohup) stay so.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)

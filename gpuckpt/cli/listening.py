"""Who hears the events of a running flow: the JSON writer, the progress display, or nobody."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import sys
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from gpuckpt.cli.canvas import write
from gpuckpt.cli.manner import Manner, is_terminal
from gpuckpt.cli.speed import MinuteLines
from gpuckpt.cli.words import duration, safe
from gpuckpt.model.report import Event

if TYPE_CHECKING:
    from gpuckpt.cli.session import Listener

PATIENCE_SECONDS = 2.0
"""How long the end of a run waits for a display that does not take its last events."""


@contextlib.contextmanager
def listening(manner: Manner) -> Iterator[Listener]:
    """The listener for this manner; whatever it draws is finished or given up on exit."""
    if manner.json:
        relay = Relay(lambda event: _write_unlocked(json.dumps(event.to_json())))
    elif manner.verbose and not manner.quiet:
        relay = Relay(_each_line())
    elif not (manner.quiet or manner.shares_terminal) and is_terminal(sys.stderr):
        from gpuckpt.cli.progress import Progress  # noqa: PLC0415  rich.progress takes 64 ms

        progress = Progress()
        relay = Relay(progress.show, progress.close)
    elif manner.quiet or (manner.shares_terminal and is_terminal(sys.stderr)):
        yield _ignore
        return
    elif manner.shares_terminal:
        relay = Relay(_write_warning)
    else:
        relay = Relay(MinuteLines(_write_unlocked).show)
    try:
        yield relay.hear
    finally:
        relay.close()


def _ignore(_event: Event) -> None:
    """Nobody is there."""


def _write_warning(event: Event) -> None:
    """Of a job that is waited for: what went wrong beside it, at once, for it may run for days."""
    if event.state == "note" and event.phase in ("ready", "post_restore"):
        _write_line(event)


def _each_line() -> Callable[[Event], None]:
    minutes = MinuteLines(_write_unlocked)

    def show(event: Event) -> None:
        minutes.show(event)
        _write_line(event)

    return show


def _write_line(event: Event) -> None:
    if event.state == "progress":
        return
    took = f" {duration(event.seconds)}" if event.seconds is not None else ""
    words = f": {safe(event.message)}" if event.message else ""
    state = " done" if event.state == "end" else ""
    _write_unlocked(f"gpuckpt: {safe(event.phase)}{state}{took}{words}")


def _write_unlocked(line: str) -> None:
    """Write to stderr without Python's buffer: a thread stuck inside it would keep the program from ending."""
    try:
        number = sys.stderr.fileno()
    except (OSError, ValueError, AttributeError):
        write(sys.stderr, line + "\n")
        return
    rest = line.encode("ascii", "backslashreplace") + b"\n"
    while rest:
        rest = rest[os.write(number, rest) :]


class Relay:
    """Hands events to a thread that writes them, so that a blocked terminal or pipe never blocks the flow.

    `hear` returns at once and raises nothing.
    """

    def __init__(self, show: Callable[[Event], None], close: Callable[[], None] = lambda: None) -> None:
        self._show = show
        self._close = close
        self._events: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._write, name="events", daemon=True)
        self._thread.start()

    def hear(self, event: Event) -> None:
        """Take one event."""
        self._events.put(event)

    def close(self) -> None:
        """Let the thread finish; one that is stuck is left alone."""
        self._events.put(None)
        self._thread.join(PATIENCE_SECONDS)

    def _write(self) -> None:
        # A screen that cannot be drawn is no reason to lose a job: the display ends, the run goes on.
        with contextlib.suppress(Exception):
            while (event := self._events.get()) is not None:
                self._show(event)
        with contextlib.suppress(Exception):
            self._close()

"""Signals and the deadline of the whole operation: noticed between steps, never in the middle of one."""

from __future__ import annotations

import contextlib
import signal
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

WATCHED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class BrokenOff(Exception):
    """The user, the system or the deadline wants the operation to end: unwind, then say so."""

    def __init__(self, why: str, signal_number: int | None = None) -> None:
        super().__init__(why)
        self.why = why
        self.signal_number = signal_number


class Interruption:
    """Notes signals and knows the deadline; `check()` raises BrokenOff at a place that can unwind."""

    def __init__(self, timeout_seconds: float | None) -> None:
        self._deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        self.caught: int | None = None
        self._broken_off = ""

    def left_seconds(self) -> float | None:
        """Seconds until the deadline; None without one."""
        return None if self._deadline is None else max(0.1, self._deadline - time.monotonic())

    def check(self) -> None:
        """Raise BrokenOff if a signal came, the deadline has passed, or another thread wants the end."""
        self.check_signals()
        if self._broken_off:
            raise BrokenOff(self._broken_off)
        if self._deadline is not None and time.monotonic() > self._deadline:
            raise BrokenOff("the deadline (--timeout) passed")

    def check_signals(self) -> None:
        """Raise BrokenOff if a signal came, whatever the time."""
        if self.caught is not None:
            raise BrokenOff(f"{signal.Signals(self.caught).name} came", self.caught)

    def break_off(self, why: str) -> None:
        """From any thread: whoever waits for this is gone."""
        self._broken_off = why

    def _note(self, number: int, _frame: object) -> None:
        self.caught = number


@contextlib.contextmanager
def watching(timeout_seconds: float | None) -> Iterator[Interruption]:
    """Watch for signals while the block runs. A signal that was ignored before (nohup) stays ignored."""
    interruption = Interruption(timeout_seconds)
    before = {}
    for number in WATCHED:
        if signal.getsignal(number) is not signal.SIG_IGN:
            before[number] = signal.signal(number, interruption._note)  # noqa: SLF001 - its own handler
    # Ctrl-Z would stop us while the job stands at the gate.
    before[signal.SIGTSTP] = signal.signal(signal.SIGTSTP, signal.SIG_IGN)
    try:
        yield interruption
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

"""How fast a transfer goes and how long it will take, out of its events."""

from __future__ import annotations

import time
from collections.abc import Callable

from gpuckpt.cli.words import duration, safe, size
from gpuckpt.model.report import Event

MINUTE_SECONDS = 60.0


class Speed:
    """The amount, rate and remaining time of one phase."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._begun: tuple[float, int] | None = None

    def words(self, event: Event) -> str:
        """'1.2 GiB of 3.0 GiB, 240 MiB/s, 7.70 s left'; what was there before it began counts as done, not as fast."""
        done = event.done_bytes or 0
        if self._begun is None:
            self._begun = (self._clock(), done)
        since, before = self._begun
        of = f" of {size(event.total_bytes)}" if event.total_bytes else ""
        seconds = self._clock() - since
        if event.phase != "transfer" or done <= before or seconds < 1:
            return f"{size(done)}{of}"
        rate = (done - before) / seconds
        left = f", {duration(((event.total_bytes or done) - done) / rate)} left" if event.total_bytes else ""
        return f"{size(done)}{of}, {size(rate)}/s{left}"


class MinuteLines:
    """One line a minute about a transfer, where no display shows it."""

    def __init__(self, write: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._write, self._clock = write, clock
        self._speed = Speed(clock)
        self._said = clock()

    def show(self, event: Event) -> None:
        """Take one event."""
        if event.phase != "transfer" or event.state != "progress":
            return
        words = self._speed.words(event)
        if self._clock() - self._said >= MINUTE_SECONDS:
            self._said = self._clock()
            self._write(f"gpuckpt: {safe(event.phase)}: {words}")

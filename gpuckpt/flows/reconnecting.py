"""When a connection that broke is opened again, and how something that blocks is waited for with an eye on signals."""

from __future__ import annotations

import contextlib
import queue
import threading
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

TRIES = 6
"""Connections that break one after another without a byte between them: then a person is needed."""

PAUSES = (1.0, 2.0, 4.0, 8.0, 15.0)
LOOK_SECONDS = 0.2

Found = TypeVar("Found")


class Patience:
    """Counts connections that break one after another."""

    def __init__(self) -> None:
        self.broken = 0
        """Without a byte between them."""
        self._before = 0

    def after_a_break(self, done_bytes: int) -> float | None:
        """Seconds to wait before the next try, given all that was carried so far; None when a person is needed."""
        self.broken = 1 if done_bytes > self._before else self.broken + 1
        self._before = done_bytes
        return None if self.broken >= TRIES else PAUSES[min(self.broken, len(PAUSES)) - 1]


def unwaited(act: Callable[[], Found], look: Callable[[], None], let_go: Callable[[Found], None]) -> Found:
    """What `act` gives, which may block for long.

    `look` is called meanwhile and may raise; then nobody waits for `act` any more, and what it still gives is
    let go. Raises what `act` and `look` raise.
    """
    outcome: queue.SimpleQueue[tuple[Found | None, BaseException | None]] = queue.SimpleQueue()
    wanted = threading.Event()
    wanted.set()

    def carry_out() -> None:
        try:
            outcome.put((act(), None))
        except BaseException as error:  # noqa: BLE001 - it is raised in the thread that waits
            outcome.put((None, error))
        if not wanted.is_set():
            _empty(outcome, let_go)

    # Not joined after a signal: the end of this process ends a connection too.
    threading.Thread(target=carry_out, daemon=True).start()
    try:
        while True:
            with contextlib.suppress(queue.Empty):
                found, error = outcome.get(timeout=LOOK_SECONDS)
                break
            look()
    except BaseException:
        wanted.clear()
        _empty(outcome, let_go)
        raise
    if error is not None:
        raise error
    return found  # type: ignore[return-value]  # None only where there is an error


def _empty(
    outcome: queue.SimpleQueue[tuple[Found | None, BaseException | None]], let_go: Callable[[Found], None]
) -> None:
    with contextlib.suppress(queue.Empty):
        found, error = outcome.get_nowait()
        if error is None:
            let_go(found)  # type: ignore[arg-type]

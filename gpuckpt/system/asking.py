"""Several questions at once: most are put to programs that are started for it and then waited for."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

Answer = TypeVar("Answer")

LEAVE_SECONDS = 5.0
"""How long a command that fails meanwhile waits for programs it has started: one that answers at all has by then."""


class _Asked(Generic[Answer]):
    """A question that is being asked. Call it for the answer; it raises what the question raised.

    As a context manager it waits for that in any case, so that no program goes on when the command has ended.
    """

    def __init__(self, ask: Callable[[], Answer]) -> None:
        self._ask = ask
        self._answers: list[Answer] = []
        self._error: BaseException | None = None
        # One that hangs must not keep a command from ending.
        self._thread = threading.Thread(target=self._run, name="asking", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._answers.append(self._ask())
        except BaseException as error:  # noqa: BLE001 - whoever asks is told
            self._error = error

    def __call__(self) -> Answer:
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._answers[0]

    def __enter__(self) -> _Asked[Answer]:
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.join(LEAVE_SECONDS)


def meanwhile(ask: Callable[[], Answer]) -> _Asked[Answer]:
    """Ask in a thread of its own, from now on; the answer comes from calling what is returned."""
    return _Asked(ask)

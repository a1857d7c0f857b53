"""The doors of push and pull: apart from the others, so that a transfer does not load what dumps and restores."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpuckpt.flows import transfer as transferring
from gpuckpt.flows.interruption import watching
from gpuckpt.flows.reporting import reported

if TYPE_CHECKING:
    from collections.abc import Callable

    from gpuckpt.model.report import Event, Report
    from gpuckpt.model.requests import PullRequest, PushRequest

    Listener = Callable[[Event], None]


def push(request: PushRequest, listener: Listener) -> Report:
    """Image -> another host."""
    with watching(request.timeout_seconds) as interruption:
        return reported("push", lambda: transferring.push(request, listener, interruption))


def pull(request: PullRequest, listener: Listener) -> Report:
    """Image of another host -> here."""
    with watching(request.timeout_seconds) as interruption:
        return reported("pull", lambda: transferring.pull(request, listener, interruption))

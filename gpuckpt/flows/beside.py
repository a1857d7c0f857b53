"""restore --wait: whether the job is ready, and --post-restore, in a thread beside the wait for its end.

The main thread must pass signals and the terminal on all the while: a job whose terminal nobody reads does not come up.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from gpuckpt.model.errors import RestoredUnhealthy
from gpuckpt.model.report import Event, Finding

if TYPE_CHECKING:
    from collections.abc import Callable

    from gpuckpt.flows.hooks import Hooked


class JobOver(Exception):
    """The job has ended: there is nothing left to be ready."""


class Beside:
    """What goes on while the job is waited for. Use as a context manager around the wait."""

    def __init__(self, hooked: Hooked, see_ready: Callable[[Callable[[], None]], dict[str, Any]]) -> None:
        self._hooked = hooked
        self._see_ready = see_ready
        self._job_is_over = threading.Event()
        self._thread = threading.Thread(target=self._work, name="readiness")
        self.data: dict[str, Any] = {}
        """For the report."""
        self.findings: list[Finding] = []

    def __enter__(self) -> Beside:  # noqa: PYI034 - typing.Self comes with 3.11
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._job_is_over.set()
        self._thread.join()

    def _work(self) -> None:
        outcome = "failed"
        try:
            self.data = self._see_ready(self._check)
            outcome = "ok"
        except JobOver:
            pass
        except RestoredUnhealthy as error:
            self._warn(Finding("ready", "fail", "warn", "the job is ready in time", error.message, error.hint))
        finding = self._hooked.run_last(outcome, "restored", self._check_signals)
        if finding is not None:
            self._warn(finding)

    def _warn(self, finding: Finding) -> None:
        """At once, for the job may run for days, and in the report."""
        self.findings.append(finding)
        phase = "ready" if finding.id == "ready" else "post_restore"
        self._hooked.machine.listener(Event(phase, "note", f"{finding.id}: {finding.found}"))

    def _check(self) -> None:
        if self._job_is_over.is_set():
            raise JobOver

    def _check_signals(self) -> None:
        # While the job lives signals are its own.
        if self._job_is_over.is_set():
            self._hooked.interruption.check_signals()

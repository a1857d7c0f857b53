"""Whether a restored tree serves again: probed from the moment it was let go, until it is ready or its time is over.

For whoever has brought a tree back: restore on this host, the far side of a migration on its own.
"""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, Any

from gpuckpt.flows import settle
from gpuckpt.model.errors import RestoredUnhealthy
from gpuckpt.model.report import Event
from gpuckpt.system import procfs
from gpuckpt.system.shell import run_line

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from gpuckpt.flows.machine import Machine
    from gpuckpt.model.facts import ProcessId
    from gpuckpt.model.requests import Readiness
    from gpuckpt.system.probing import Attempt

    Probe = Callable[[float], str | None]
    """One attempt, with the seconds that are left for all of them: None when ready, else why not."""

STEP_SECONDS = 0.05
FIRST_PAUSE_SECONDS = 0.1
LONGEST_PAUSE_SECONDS = 0.5
GROWTH = 1.5
ATTEMPT_SECONDS = 5.0
"""The longest that one attempt by TCP or HTTP may take: a service that is coming up may swallow the first."""

COMMAND_SECONDS = 30.0
"""The same for the command."""


class NotReady(Exception):
    """The time is over. Says which probe failed last, and why."""


def see_ready(
    readiness: Readiness,
    root: ProcessId,
    machine: Machine,
    variables: Mapping[str, str],
    *,
    began: float,
    check: Callable[[], None],
) -> dict[str, Any]:
    """Watch a tree that was let go until it is ready; for the report, how long all took since `began` (monotonic).

    `check` as in wait_until_ready. Raises RestoredUnhealthy when it ends meanwhile, or runs and is not ready in time.
    """
    machine.listener(Event("ready", "begin"))
    with procfs.Watched(root) as watched:

        def look() -> None:
            check()
            if procfs.state(root) in procfs.ENDED:
                why = f"process {root.pid} ended before it was ready{settle.how_it_ended(watched.wait_status())}"
                raise RestoredUnhealthy(why, "its own output says why", process="gone")

        try:
            seconds = wait_until_ready(readiness, variables, look)
        except NotReady as trouble:
            why = f"process {root.pid} runs, but was not ready within {readiness.timeout_seconds:g} s: {trouble}"
            raise RestoredUnhealthy(
                why, "it runs on: look at its own output, or give it longer (--ready-timeout)", process="restored"
            ) from None
    machine.listener(Event("ready", "end", seconds=seconds))
    return _compared(time.monotonic() - began, readiness.cold_start_seconds)


def _compared(ready_seconds: float, cold_start_seconds: float | None) -> dict[str, Any]:
    found: dict[str, Any] = {"ready_seconds": ready_seconds}
    if cold_start_seconds is not None:
        found["cold_start"] = {"seconds": cold_start_seconds, "factor": cold_start_seconds / max(ready_seconds, 1e-3)}
    return found


def wait_until_ready(readiness: Readiness, variables: Mapping[str, str], check: Callable[[], None]) -> float:
    """Probe until everything that is asked for was seen ready once; returns the seconds it took.

    `check` is called all the while and ends the wait by raising. `variables` are for the command. Raises NotReady.
    """
    began = time.monotonic()
    for name, probe in _probes(readiness, variables, check).items():
        _until(name, probe, began + readiness.timeout_seconds, check)
    return time.monotonic() - began


def _probes(readiness: Readiness, variables: Mapping[str, str], check: Callable[[], None]) -> dict[str, Probe]:
    """The quick ones first: they cost nothing while it is not up."""
    from gpuckpt.system import probing  # noqa: PLC0415  http.client and its kin are for those who ask for them

    probes: dict[str, Probe] = {}
    if readiness.address is not None:
        host, port = address = readiness.address
        where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        probes[f"--ready-tcp {where}"] = lambda left: _attempt(partial(probing.tcp, address), left, check)
    if readiness.url is not None:
        url = readiness.url
        probes[f"--ready-http {url}"] = lambda left: _attempt(partial(probing.web, url), left, check)
    if readiness.command is not None:
        line = readiness.command
        probes["--ready-cmd"] = lambda left: _command(line, variables, left, check)
    return probes


def _until(name: str, probe: Probe, deadline: float, check: Callable[[], None]) -> None:
    pause = FIRST_PAUSE_SECONDS
    problem = ""
    while (left := deadline - time.monotonic()) > 0:
        found = probe(left)
        if found is None:
            return
        # What the deadline cut short says less than the attempt before it.
        problem = problem if problem and time.monotonic() >= deadline else found
        _sleep(min(pause, max(0.0, deadline - time.monotonic())), check)
        pause = min(pause * GROWTH, LONGEST_PAUSE_SECONDS)
    problem = problem or "there was no time left to ask"
    raise NotReady(f"{name}: {problem}")


def _sleep(seconds: float, check: Callable[[], None]) -> None:
    until = time.monotonic() + seconds
    check()
    while (left := until - time.monotonic()) > 0:
        time.sleep(min(left, STEP_SECONDS))
        check()


def _attempt(begin: Callable[[float], Attempt], left: float, check: Callable[[], None]) -> str | None:
    seconds = min(left, ATTEMPT_SECONDS)
    until = time.monotonic() + seconds
    attempt = begin(seconds)
    try:
        while not attempt.over.wait(STEP_SECONDS) and time.monotonic() < until:
            check()
        # Asked before its socket is cut: half an answer would look like a whole one.
        return attempt.problem if attempt.over.is_set() else "no answer"
    finally:
        attempt.cancel()


def _command(line: str, variables: Mapping[str, str], left: float, check: Callable[[], None]) -> str | None:
    try:
        ended = run_line(line, variables, timeout=min(left, COMMAND_SECONDS), check=check)
    except OSError as error:
        return f"it could not be started: {error.strerror}"
    return None if ended.ok else ended.describe()

"""What a restore built: which processes are its own, whether they came alive, and how they are ended.

A pid of the image proves nothing: a stranger may have had it all along, or may have taken it since. A
process is the restore's own when CRIU's log says that it was forked, and when it was born while that
CRIU was at work.
"""

from __future__ import annotations

import os
import re
import signal
import time
from typing import TYPE_CHECKING

from gpuckpt.model.facts import ProcessId
from gpuckpt.system import namespaces, procfs

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable
    from pathlib import Path

    from gpuckpt.owner.journal import PastRun

KILL_SECONDS = 10.0
SLACK_SECONDS = 2.0
"""Between the last line of CRIU's log and the last thing CRIU did."""


NAMESPACE = "namespace"
"""The journal's line about process 1 of the pid namespace that a tree has for itself."""

_FORKING = re.compile(r"Forking task with (\d+) pid")
_NOT_FORKED = re.compile(r"Can't fork for (\d+):")
_FINISHED = "Restore finished successfully"


def came_alive(log: Path) -> bool:
    """Whether this CRIU got as far as letting the restored tree run."""
    return _FINISHED in _text(log)


def own_processes(log: Path, pids: Iterable[int], *, born_after: int, long_ago: bool) -> list[ProcessId]:
    """The living processes with one of these pids that the CRIU of this log has forked.

    `born_after`: clock ticks since boot, the start of the run. With `long_ago` the run has ended, and a
    pid may have become another's since: only what was born before the log's last line counts.
    """
    text = _text(log)
    forked = {int(pid) for pid in _FORKING.findall(text)} - {int(pid) for pid in _NOT_FORKED.findall(text)}
    born_before = _last_written_ticks(log) if long_ago else float("inf")
    alive = (now for pid in pids if pid in forked and (now := procfs.process_id(pid)))
    return [
        now for now in alive if born_after <= now.start_ticks <= born_before and procfs.state(now) not in procfs.ENDED
    ]


def end_half_built(log: Path, pids: Collection[int], *, born_after: int, long_ago: bool = False) -> list[int]:
    """SIGKILL what the CRIU of this log built; returns the pids that are left.

    Looked for again until nothing is found: without CRIU half-built processes go on forking their children.
    """
    deadline = time.monotonic() + KILL_SECONDS
    killed: set[ProcessId] = set()
    while left := own_processes(log, pids, born_after=born_after, long_ago=long_ago):
        for identity in left:
            procfs.send(identity, signal.SIGKILL)
        killed.update(left)
        if time.monotonic() > deadline:
            break
        time.sleep(0.01)
    # A zombie keeps its pid, and the next restore would find it taken: ours are reaped, init's awaited.
    while any(procfs.is_same(one) for one in killed) and time.monotonic() < deadline:
        _reap()
        time.sleep(0.01)
    return [identity.pid for identity in left]


def _text(log: Path) -> str:
    try:
        return log.read_text("utf-8", "replace")
    except OSError:
        return ""


def _last_written_ticks(log: Path) -> float:
    """When the log was last written to, in clock ticks since boot; start times have the same clock."""
    try:
        age = time.time() - log.stat().st_mtime
    except OSError:
        return 0.0
    return (time.clock_gettime(time.CLOCK_BOOTTIME) - age + SLACK_SECONDS) * os.sysconf("SC_CLK_TCK")


def _reap() -> None:
    """Collect ended children."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return


def end_namespace(init: ProcessId) -> list[int]:
    """SIGKILL process 1: the kernel ends the namespace with it. Returns the pids that are left after some seconds.

    Ended processes that we hold stay until we have taken note of their ends.
    """
    members = [init, *procfs.inside(init).values()]
    procfs.send(init, signal.SIGKILL)
    deadline = time.monotonic() + KILL_SECONDS
    while (left := [one for one in members if procfs.is_same(one)]) and time.monotonic() < deadline:
        namespaces.reap_all()
        time.sleep(0.01)
    return [one.pid for one in left if procfs.state(one) not in procfs.ENDED]


def init_of(past: PastRun) -> ProcessId | None:
    """Process 1 of the namespace that a past run made; None where it made none."""
    line = past.last(NAMESPACE)
    return ProcessId(int(line["pid"]), int(line["start_ticks"])) if line is not None else None


def is_enclosed(past: PastRun) -> bool:
    """The run was to restore into a pid namespace: the pids of its order are none of this host's."""
    order = past.last("order")
    enclosed = order["order"].get("enclosed") if order is not None and order["kind"] == "restore" else None
    return bool(enclosed and enclosed["pid"])

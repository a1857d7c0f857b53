"""Who is who: process identities, the shape of a tree, and whose number a number is."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Literal

from gpuckpt.model.facts import ProcessId
from gpuckpt.model.records import dataclass
from gpuckpt.system.procfs.reading import (
    Stat,
    all_pids,
    comm_of,
    exists,
    list_numbers,
    read_bytes,
    stat_of,
    status_of,
    words_for,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

REAP_STEP_SECONDS = 0.02

PidIs = Literal["process", "thread", "none", "kernel", "zombie"]


@dataclass(frozen=True, slots=True)
class PidKind:
    """What a number given as a pid is. Everything but `kind` is empty when there is no such process."""

    kind: PidIs
    tgid: int = 0
    """The process a thread belongs to; the pid itself for a process."""
    comm: str = ""
    uid: int = -1
    state: str = ""
    tracer_pid: int = 0
    tracer: str = ""
    """'1234 gdb', or ''."""
    ppid: int = 0
    parent: str = ""
    """'1 systemd', or ''."""


def process_id(pid: int) -> ProcessId | None:
    """The identity of a pid now, or None when there is no such process."""
    stat = stat_of(pid)
    return ProcessId(pid, stat.start_ticks) if stat else None


def is_same(process: ProcessId) -> bool:
    """The process exists (perhaps as a zombie) and is the one that was meant."""
    return process_id(process.pid) == process


def started_at(process: ProcessId) -> float:
    """When a process was started, in seconds since 1970, by the clock as it is set now."""
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - process.start_ticks / os.sysconf("SC_CLK_TCK")
    return time.time() - age


ENDED = (None, "Z", "X")
"""States of processes in which no instruction runs any more: gone, not yet reaped, being removed."""


def state(process: ProcessId) -> str | None:
    """The letter of /proc/PID/stat, or None when the process is gone or its pid is another's."""
    stat = stat_of(process.pid)
    return stat.state if stat and stat.start_ticks == process.start_ticks else None


def thread_state(tid: int) -> str | None:
    """The letter of a thread (or process) by its number alone; None when there is none."""
    stat = stat_of(tid)
    return stat.state if stat else None


def threads(pid: int) -> list[int]:
    """The thread ids of a process, its own first where it still runs; empty when it is gone."""
    return list_numbers(f"/proc/{pid}/task")


def inner_id(number: int) -> int | None:
    """The number that a process or thread has in its own pid namespace; None when it is gone.

    The innermost one stands last in NSpid (proc_pid_status(5)): the others are those of the namespaces around it.
    """
    status = status_of(number)
    return int(status["NSpid"].split()[-1]) if status is not None and "NSpid" in status else None


def inside(init: ProcessId) -> dict[int, ProcessId]:
    """The processes of the pid namespace that `init` is process 1 of, by their numbers in there; it is left out."""
    found = ((inner_id(one.pid), one) for one in tree_ids(init) if one != init)
    return {number: one for number, one in found if number is not None}


def outer_tid(process: ProcessId, number: int) -> int | None:
    """The thread of a process that has this number in its pid namespace, as we see it."""
    return next((tid for tid in threads(process.pid) if inner_id(tid) == number), None)


def describe_pid(pid: int) -> PidKind:
    """Say what a number given as a pid is."""
    stat, status = stat_of(pid), status_of(pid)
    if stat is None or status is None:
        return PidKind("none")
    tracer = int(status["TracerPid"])
    return PidKind(
        kind=_kind(stat, int(status["Tgid"])),
        tgid=int(status["Tgid"]),
        comm=stat.comm,
        uid=int(status["Uid"].split()[0]),
        state=stat.state,
        tracer_pid=tracer,
        tracer=words_for(tracer) if tracer else "",
        ppid=stat.ppid,
        parent=words_for(stat.ppid) if stat.ppid else "",
    )


def _kind(stat: Stat, tgid: int) -> PidIs:
    # /proc/TID exists for every thread although /proc does not list it.
    if tgid != stat.pid:
        return "thread"
    if stat.kernel_thread:
        return "kernel"
    return "zombie" if stat.state in "ZX" else "process"


def ancestors(pid: int) -> list[tuple[int, str]]:
    """(pid, name) of parent, grandparent … as far as this pid namespace shows them; empty when pid is gone."""
    found: list[tuple[int, str]] = []
    stat = stat_of(pid)
    while stat is not None and stat.ppid > 0:
        stat = stat_of(stat.ppid)
        if stat is not None:
            found.append((stat.pid, stat.comm))
    return found


def tree_ids(root: ProcessId) -> list[ProcessId]:
    """The processes of a tree as seen in one pass: root first, parents before children; empty when root is gone.

    A process that forks meanwhile can hide a child: repeat until two passes agree where that matters.
    """
    if not is_same(root):
        return []
    children = _children_by_file if exists("/proc/thread-self/children") else _children_by_scan()
    found: dict[int, ProcessId] = {}
    pending = [root]
    while pending:
        process = pending.pop()
        found[process.pid] = process
        born = (process_id(pid) for pid in children(process.pid) if pid not in found)
        pending.extend(reversed([child for child in born if child is not None]))
    return list(found.values())


def _children_by_file(pid: int) -> list[int]:
    """Children of all threads of a process: each child belongs to the thread that forked it."""
    lists = (read_bytes(f"/proc/{pid}/task/{tid}/children") or b"" for tid in threads(pid))
    return [int(child) for line in lists for child in line.split()]


class _children_by_scan:  # noqa: N801 - called like the function it stands in for
    """Children by everybody's ppid, for kernels without CONFIG_PROC_CHILDREN."""

    def __init__(self) -> None:
        self.by_parent: dict[int, list[int]] = {}
        for stat in filter(None, map(stat_of, all_pids())):
            self.by_parent.setdefault(stat.ppid, []).append(stat.pid)

    def __call__(self, pid: int) -> list[int]:
        return self.by_parent.get(pid, [])


def who_uses_ids(ids: Iterable[int], reap_seconds: float = 0.0) -> dict[int, str]:
    """Which of these numbers are taken here as pid, thread, process group or session, and by whom.

    A number without a process can still be taken: as the group or session of others. Zombies count; where nothing but
    zombies is in the way, their parents get `reap_seconds` to reap them.
    """
    wanted = set(ids)
    deadline = time.monotonic() + reap_seconds
    while (used := _who_uses(wanted)) and time.monotonic() < deadline and all(one.is_zombie for one in used.values()):
        time.sleep(REAP_STEP_SECONDS)
    return {number: one.words for number, one in used.items()}


@dataclass(frozen=True, slots=True)
class _User:
    """Who has a number."""

    words: str
    is_zombie: bool


def _who_uses(wanted: set[int]) -> dict[int, _User]:
    used = {number: user for number in wanted if (user := _owner_of(number)) is not None}
    missing = wanted - used.keys()
    if missing:
        for stat in filter(None, map(stat_of, all_pids())):
            _note_group(stat, missing, used)
    return used


def _owner_of(number: int) -> _User | None:
    what = describe_pid(number)
    if what.kind == "none":
        return None
    if what.kind == "thread":
        return _User(f"{what.tgid} {comm_of(what.tgid)} (as thread)", is_zombie=False)
    if what.kind == "zombie":
        return _User(f"{number} {what.comm} (zombie of {what.parent})", is_zombie=True)
    return _User(f"{number} {what.comm}", is_zombie=False)


def _note_group(stat: Stat, missing: set[int], used: dict[int, _User]) -> None:
    is_zombie = stat.state in "ZX"
    for number, role in ((stat.sid, "session"), (stat.pgid, "process group")):
        known = used.get(number)
        if number in missing and (known is None or (known.is_zombie and not is_zombie)):
            used[number] = _User(f"{stat.pid} {stat.comm} (as {role} id)", is_zombie)

"""Signals, to the process that was meant and to no other, and waiting for its end."""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING

from gpuckpt.model.facts import ProcessId
from gpuckpt.system.procfs.identity import is_same, state, threads
from gpuckpt.system.procfs.reading import read_bytes, read_text, stat_of, words_for

if TYPE_CHECKING:
    from collections.abc import Iterable

POLL_SECONDS = 0.01


def send(process: ProcessId, signum: int) -> bool:
    """Send a signal through a pidfd; False when the process is gone or its pid is another's. Raises PermissionError."""
    try:
        handle = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return False
    try:
        # The start time is read after the pidfd is open: from here on the handle cannot change its process.
        if not is_same(process):
            return False
        signal.pidfd_send_signal(handle, signum)  # noqa: TID251 - this is its home
    except ProcessLookupError:
        return False
    finally:
        os.close(handle)
    return True


def send_pid(pid: int, signum: int) -> bool:
    """Signal a child of our own that nobody has waited for: its pid cannot become another's. False when gone."""
    try:
        os.kill(pid, signum)  # noqa: TID251 - this is its home
    except ProcessLookupError:
        return False
    return True


def wait_ended(processes: Iterable[ProcessId], timeout: float) -> list[ProcessId]:
    """Wait until the processes have ended, reaped or not, at most `timeout` seconds; return who has not.

    What has ended has given its memory back, the GPU's too, but may still have its pid: see `wait_gone`.
    """
    deadline = time.monotonic() + timeout
    left = [process for process in processes if not _has_ended(process)]
    while left and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
        left = [process for process in left if not _has_ended(process)]
    return left


def _has_ended(process: ProcessId) -> bool:
    # The first thread can be a zombie while others still end: those are listed beside it so long.
    return not is_same(process) or (state(process) in ("Z", "X") and len(threads(process.pid)) <= 1)


def wait_gone(processes: Iterable[ProcessId], timeout: float) -> list[tuple[ProcessId, str]]:
    """Wait until the processes have left /proc, at most `timeout` seconds; return who has not, and why.

    The reason is 'zombie of PPID NAME' for one that ended and that its parent has not reaped, else its state.
    """
    deadline = time.monotonic() + timeout
    left = [process for process in processes if is_same(process)]
    while left and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
        left = [process for process in left if is_same(process)]
    return [(process, why) for process in left if (why := _why_it_stays(process))]


def _why_it_stays(process: ProcessId) -> str:
    stat = stat_of(process.pid)
    if stat is None or stat.start_ticks != process.start_ticks:
        return ""
    if stat.state in "ZX":
        return f"zombie of {words_for(stat.ppid)}"
    return f"state {stat.state}, {stat.comm}"


def io_bytes(pid: int) -> int | None:
    """Bytes a process has read and written so far by system calls; None when it is gone. For a watchdog.

    A program that spins without moving a byte keeps this number while its cpu_seconds grow.
    """
    text = read_text(f"/proc/{pid}/io")
    if not text:
        return None
    counters = dict(line.split(": ", 1) for line in text.splitlines())
    return int(counters["rchar"]) + int(counters["wchar"])


def cpu_seconds(pid: int) -> float | None:
    """Processor time of all threads of a process so far, or None when it is gone."""
    stat = stat_of(pid)
    return None if stat is None else stat.cpu_ticks / os.sysconf("SC_CLK_TCK")


def wchan(pid: int) -> str | None:
    """The kernel function in which the main thread waits ('' when it runs), or None when the process is gone."""
    raw = read_bytes(f"/proc/{pid}/wchan")
    if raw is None:
        return None
    return "" if raw == b"0" else raw.decode()


def set_own_oom_score_adj(value: int) -> bool:
    """Set how readily the kernel's out-of-memory killer takes this process (-1000 never); False when not allowed.

    Lowering it needs CAP_SYS_RESOURCE. Children inherit it: reset it for them.
    """
    try:
        # One write call: the kernel parses each write by itself.
        handle = os.open("/proc/self/oom_score_adj", os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.write(handle, b"%d" % value)
        finally:
            os.close(handle)
    except OSError:
        return False
    return True

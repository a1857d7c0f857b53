"""Pids with their names, for TAB: system/procfs knows more, and takes longer to load than a shell's user waits."""

from __future__ import annotations

import os

PF_KTHREAD = 0x00200000
"""include/linux/sched.h: set in field 9 of /proc/PID/stat of kernel threads."""


def named_pids(start: str) -> list[tuple[int, str]]:
    """Processes whose pid begins with `start`, ascending, with their names; no kernel threads."""
    with os.scandir("/proc") as entries:
        pids = sorted(int(entry.name) for entry in entries if entry.name.isdigit() and entry.name.startswith(start))
    return [(pid, name) for pid in pids if (name := _name(pid)) is not None]


def _name(pid: int) -> str | None:
    """None when the process is gone, or a kernel thread (proc_pid_stat(5))."""
    try:
        with open(f"/proc/{pid}/stat", "rb", buffering=0) as file:  # noqa: PTH123 - pathlib would cost more
            raw = file.read()
    except OSError:
        return None
    name, _, rest = raw.partition(b"(")[2].rpartition(b")")  # a name may hold brackets itself
    return None if int(rest.split()[6]) & PF_KTHREAD else os.fsdecode(name)

"""The only code that reads /proc and /sys/fs/cgroup facts of processes and that sends signals."""

from gpuckpt.system.procfs.identity import (
    PidKind,
    ancestors,
    describe_pid,
    is_same,
    process_id,
    state,
    threads,
    tree_ids,
    who_uses_ids,
)
from gpuckpt.system.procfs.reading import Mapping, maps_of
from gpuckpt.system.procfs.signals import (
    cpu_seconds,
    io_bytes,
    send,
    send_pid,
    set_own_oom_score_adj,
    wait_gone,
    wchan,
)

__all__ = [
    "Mapping",
    "PidKind",
    "ancestors",
    "cpu_seconds",
    "describe_pid",
    "io_bytes",
    "is_same",
    "maps_of",
    "process_id",
    "send",
    "send_pid",
    "set_own_oom_score_adj",
    "state",
    "threads",
    "tree_ids",
    "wait_gone",
    "wchan",
    "who_uses_ids",
]

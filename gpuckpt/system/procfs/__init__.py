"""The only code that reads /proc and /sys/fs/cgroup facts of processes and that sends signals."""

from gpuckpt.system.procfs.cgroups import (
    MemoryLimit,
    cgroup2_mount,
    cgroup_of,
    memory_limits,
    pids_in_cgroup,
    unified_cgroup_of,
)
from gpuckpt.system.procfs.descriptors import gpu_files, uses_io_uring
from gpuckpt.system.procfs.elf import build_id
from gpuckpt.system.procfs.endings import Watched
from gpuckpt.system.procfs.host import (
    HostPieces,
    cgroup_kind,
    cpu,
    lacks_resource_capability,
    memory,
    read_host_pieces,
)
from gpuckpt.system.procfs.identity import (
    PidKind,
    ancestors,
    describe_pid,
    is_same,
    process_id,
    started_at,
    state,
    thread_state,
    threads,
    tree_ids,
    who_uses_ids,
)
from gpuckpt.system.procfs.looking import (
    address_space_room,
    environment_values,
    file_here,
    kernel_watches,
    missing_addresses,
    ports_in_use,
    security_modules,
    special_mappings,
)
from gpuckpt.system.procfs.pages import PageLayout, page_layout
from gpuckpt.system.procfs.reading import Mapping, comm_of, descriptor_path, maps_of, program_of, words_for
from gpuckpt.system.procfs.redaction import redact, redact_text
from gpuckpt.system.procfs.signals import (
    cpu_seconds,
    io_bytes,
    send,
    send_pid,
    set_own_oom_score_adj,
    wait_gone,
    wchan,
)
from gpuckpt.system.procfs.tree import namespaces_of, read_tree

__all__ = [
    "HostPieces",
    "Mapping",
    "MemoryLimit",
    "PageLayout",
    "PidKind",
    "Watched",
    "address_space_room",
    "ancestors",
    "build_id",
    "cgroup2_mount",
    "cgroup_kind",
    "cgroup_of",
    "comm_of",
    "cpu",
    "cpu_seconds",
    "describe_pid",
    "descriptor_path",
    "environment_values",
    "file_here",
    "gpu_files",
    "io_bytes",
    "is_same",
    "kernel_watches",
    "lacks_resource_capability",
    "maps_of",
    "memory",
    "memory_limits",
    "missing_addresses",
    "namespaces_of",
    "page_layout",
    "pids_in_cgroup",
    "ports_in_use",
    "process_id",
    "program_of",
    "read_host_pieces",
    "read_tree",
    "redact",
    "redact_text",
    "security_modules",
    "send",
    "send_pid",
    "set_own_oom_score_adj",
    "special_mappings",
    "started_at",
    "state",
    "thread_state",
    "threads",
    "tree_ids",
    "unified_cgroup_of",
    "uses_io_uring",
    "wait_gone",
    "wchan",
    "who_uses_ids",
    "words_for",
]

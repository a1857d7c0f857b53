"""Reading a whole process tree: what each process is, and what all of them hold and talk through."""

from __future__ import annotations

import re

from gpuckpt.model.errors import MachineLacks, NotFound
from gpuckpt.model.facts import Process, ProcessId, Tree
from gpuckpt.model.records import dataclass
from gpuckpt.system.procfs.cgroups import cgroup_of
from gpuckpt.system.procfs.descriptors import (
    OpenDescriptor,
    descriptors_of,
    find_gpu_files,
    gpu_majors,
    has_io_uring,
)
from gpuckpt.system.procfs.ends import find_ends
from gpuckpt.system.procfs.engines import EngineSearch
from gpuckpt.system.procfs.files import FileCollector
from gpuckpt.system.procfs.identity import is_same, threads, tree_ids
from gpuckpt.system.procfs.reading import (
    Mapping,
    Stat,
    decode,
    distinct,
    maps_of,
    read_bytes,
    read_link,
    size_in,
    stat_of,
    status_of,
)
from gpuckpt.system.procfs.redaction import redact
from gpuckpt.system.procfs.surroundings import surroundings_of

NAMESPACES = ("cgroup", "ipc", "mnt", "net", "pid", "time", "user", "uts")
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_.%()-]*")


@dataclass(frozen=True, slots=True)
class Seen:
    """A process and what was read along with it, for those who look at the tree as a whole."""

    process: Process
    full_argv: tuple[str, ...]
    descriptors: list[OpenDescriptor]
    mappings: list[Mapping]
    """The distinct ones."""


def read_tree(root: ProcessId, *, keep_argv: bool = False) -> Tree:
    """Read everything about a tree but its CUDA side (`cuda` and `gpu_uses` stay empty).

    Children that end meanwhile are left out. Raises NotFound when the root is gone or another process has its
    pid, MachineLacks when this user may not read the tree.
    """
    try:
        return _read_tree(root, keep_argv=keep_argv)
    except PermissionError as error:
        message = f"{error.filename or '/proc'} cannot be read: {error.strerror}"
        # Root without CAP_SYS_PTRACE is refused too, and so is anybody with fewer capabilities than the process.
        raise MachineLacks(message, "run gpuckpt as root, with all the capabilities the process has") from error


def _read_tree(root: ProcessId, *, keep_argv: bool) -> Tree:
    majors = gpu_majors()
    seen = [found for process in tree_ids(root) if (found := _see(process, majors, keep_argv=keep_argv))]
    if not seen or seen[0].process.id != root:
        raise NotFound(
            f"process {root.pid} is gone", "look for the process again: it has ended or its pid is another's"
        )
    processes = tuple(found.process for found in seen)
    ends = find_ends({found.process.pid: found.descriptors for found in seen})
    files, engines = FileCollector(), EngineSearch()
    for found in seen:
        pid = found.process.pid
        files.add_process(pid, found.descriptors, found.mappings)
        engines.add_process(pid, found.process.exe, found.full_argv, found.mappings)
    open_files = files.files()
    return Tree(
        root=root,
        processes=processes,
        files=open_files,
        sockets=ends.sockets,
        pipes=ends.pipes,
        outside_stdio=ends.stdio,
        surroundings=surroundings_of(processes[0], processes, ends.inner_terminals),
        engines=engines.engines(open_files),
        file_locks=any(descriptor.locked for found in seen for descriptor in found.descriptors),
    )


def _see(process: ProcessId, majors: frozenset[int], *, keep_argv: bool) -> Seen | None:
    """Read one process; None when it ended meanwhile."""
    pid = process.pid
    stat, status = stat_of(pid), status_of(pid)
    if stat is None or status is None or stat.start_ticks != process.start_ticks:
        return None
    argv = argv_of(pid)
    descriptors, mappings = descriptors_of(pid), maps_of(pid)
    found = Process(
        id=process,
        ppid=stat.ppid,
        pgid=stat.pgid,
        sid=stat.sid,
        comm=stat.comm,
        argv=argv if keep_argv else redact(argv),
        exe=read_link(f"/proc/{pid}/exe") or "",
        cwd=read_link(f"/proc/{pid}/cwd") or "",
        root=read_link(f"/proc/{pid}/root") or "",
        uid=int(status["Uid"].split()[0]),
        gid=int(status["Gid"].split()[0]),
        state=stat.state,
        tracer_pid=int(status["TracerPid"]),
        kernel_thread=stat.kernel_thread,
        threads=tuple(threads(pid)),
        rss_bytes=size_in(status, "VmRSS"),
        shared_bytes=size_in(status, "RssShmem"),
        swap_bytes=size_in(status, "VmSwap"),
        namespaces=namespaces_of(pid),
        cgroup=cgroup_of(pid),
        descriptors=tuple(descriptor.fact for descriptor in descriptors),
        environment_names=environment_names(pid),
        gpu_files=find_gpu_files(pid, descriptors, mappings, majors),
        io_uring=has_io_uring(descriptors, mappings),
        seccomp=int(status.get("Seccomp", "0")),
        controlling_tty=stat.tty,
        foreground=_is_foreground(stat),
    )
    return Seen(found, argv, descriptors, distinct(mappings)) if is_same(process) else None


def _is_foreground(stat: Stat) -> bool:
    return stat.tty != 0 and stat.foreground_pgid == stat.pgid


def argv_of(pid: int) -> tuple[str, ...]:
    """The command line with its secrets; empty for zombies, kernel threads and processes that are gone.

    Programs can overwrite it: then it may be one long text, padded with zero bytes.
    """
    raw = (read_bytes(f"/proc/{pid}/cmdline") or b"").removesuffix(b"\0")
    if raw.endswith(b"\0\0"):
        raw = raw.rstrip(b"\0")
    return tuple(decode(raw).split("\0")) if raw else ()


def environment_names(pid: int) -> tuple[str, ...]:
    """Names of the variables a process was started with, never their values; text that is no variable is left out."""
    entries = decode(read_bytes(f"/proc/{pid}/environ") or b"").split("\0")
    names = (entry.partition("=")[0] for entry in entries if "=" in entry)
    return tuple(dict.fromkeys(name for name in names if VARIABLE.fullmatch(name)))


def namespaces_of(pid: int) -> dict[str, str]:
    """Kind of namespace -> 'net:[4026531840]'; kinds this kernel lacks are left out."""
    links = ((kind, read_link(f"/proc/{pid}/ns/{kind}")) for kind in NAMESPACES)
    return {kind: link for kind, link in links if link is not None}

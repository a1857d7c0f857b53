"""Checks of kernel objects that a dump would have to save: descriptors, sockets, pipes, watches."""

from __future__ import annotations

import re
from collections.abc import Iterator

from gpuckpt.checks.check import Check, Judgement, failed, listing, none_of, passed, size, unknown
from gpuckpt.checks.facts import DumpFacts, outside_connections
from gpuckpt.checks.processes import named
from gpuckpt.model.facts import Descriptor, Process, Stdio, Tree
from gpuckpt.model.manifest import GHOST_LIMIT_BYTES

SAVED_DEVICES = frozenset(f"/dev/{name}" for name in ("null", "zero", "full", "random", "urandom", "kmsg", "mem"))
GPU_DEVICES = re.compile(r"/dev/(nvidia|gdrdrv)")
"""Judged by gpu-files: the driver lets go of them when it suspends the process."""

NAMESPACES = ("cgroup", "ipc", "mnt", "net", "pid", "time", "user", "uts")
"""Descriptors of namespaces read 'net:[4026531840]'."""
SAVED_OBJECTS = frozenset(
    ("eventfd", "eventpoll", "timerfd", "signalfd", "inotify", "fanotify", "pidfd", "bpf-map", *NAMESPACES)
)
LOST_OBJECTS = frozenset(
    (
        "perf_event",
        "userfaultfd",
        "landlock-ruleset",
        "secretmem",
        "dmabuf",
        "bpf-prog",
        "bpf_link",
        "kvm-vm",
        "kvm-vcpu",
    )
)
"""CRIU refuses them: 'Can't dump file N of that type [600]' or 'Unknown shit'."""

RDMA_HINT = "RDMA cannot be saved: start the job with NCCL_IB_DISABLE=1 (for MPI: without the IB transport)"
IO_URING_HINT = (
    "CRIU cannot save io_uring: run `sysctl kernel.io_uring_disabled=2` and start the job again "
    "(libuv, uvloop and PyTorch's TCPStore then do without it)"
)


def _descriptors(facts: DumpFacts) -> Iterator[tuple[Process, Descriptor]]:
    for process in facts.tree.processes:
        for descriptor in process.descriptors:
            yield process, descriptor


def object_name(target: str) -> str:
    """'eventfd' of 'anon_inode:[eventfd]', 'pidfd' of 'pidfd:[12]', 'secretmem' of '/secretmem (deleted)'."""
    numbered = re.fullmatch(r"(\w+):\[\d+\]", target)
    if numbered:
        return numbered[1]
    if target.startswith("/"):
        return re.split(r"[ :]", target[1:])[0]
    return target.removeprefix("anon_inode:").strip("[]")


def _io_uring(facts: DumpFacts) -> Judgement:
    found = [f"{named(process)} has one" for process in facts.tree.processes if process.io_uring]
    return none_of(found, expected="no io_uring", hint=IO_URING_HINT)


def _devices(facts: DumpFacts) -> Judgement:
    found = [
        f"{named(process)} fd {descriptor.fd}: {descriptor.target}"
        for process, descriptor in _descriptors(facts)
        if descriptor.kind == "device"
        and descriptor.target not in SAVED_DEVICES
        and not GPU_DEVICES.match(descriptor.target)
    ]
    rdma = any("/dev/infiniband/" in item for item in found)
    hint = RDMA_HINT if rdma else "make the job close the device (CRIU cannot save it), then repeat the command"
    return none_of(found, expected="no open device that CRIU cannot save", hint=hint)


def _kernel_objects(facts: DumpFacts) -> Judgement:
    expected = "only kernel objects that CRIU can save"
    hint = "switch off the feature of the job that opens it and start it again"
    objects = [(f"{named(p)} fd {d.fd}", object_name(d.target)) for p, d in _descriptors(facts) if d.kind == "anon"]
    objects = [(where, name) for where, name in objects if name not in SAVED_OBJECTS and name != "io_uring"]
    lost = [f"{where}: {name}" for where, name in objects if name in LOST_OBJECTS]
    lost += [f"mapped: {item}" for item in facts.special_mappings]
    lost += [f"{owner}: vsock socket" for s in facts.tree.sockets if s.family == "vsock" for owner in s.owners]
    if lost:
        return failed(expected, listing(lost), hint)
    strange = [f"{where}: {name}" for where, name in objects]
    strange += [
        f"{o}: socket of an unknown family" for s in facts.tree.sockets if s.family == "unknown" for o in s.owners
    ]
    if strange:
        return unknown(expected, listing(strange), f"the dump may fail at it (the job then runs on); {hint}")
    return passed(expected, "nothing else")


def _tcp_outside(facts: DumpFacts) -> Judgement | None:
    connections = outside_connections(facts.tree)
    if not connections:
        return None
    found = listing(f"{', '.join(s.owners)}: {s.local} to {s.remote} ({s.state})" for s in connections)
    expected = "no TCP connection that leaves the tree, or a decision about it"
    if facts.request.tcp != "refuse":
        return passed(expected, f"--tcp {facts.request.tcp} for {found}")
    hint = (
        "say --tcp close (the job finds them closed after a restore) or --tcp keep (they go on, only if the restore "
        "happens soon and with the same address), or end them"
    )
    return failed(expected, found, hint)


def _stdio_keys(facts: DumpFacts) -> frozenset[str]:
    return frozenset(stdio.key for stdio in facts.tree.outside_stdio)


def _unix_outside(facts: DumpFacts) -> Judgement:
    expected, keys = "both ends of unix socket connections inside the tree", _stdio_keys(facts)
    streams = [
        socket
        for socket in facts.tree.sockets
        if socket.family == "unix"
        and socket.type != "dgram"
        and socket.state in ("connected", "unknown")
        and not (socket.inside or f"socket:[{socket.inode}]" in keys)
    ]
    hint = "make the job close the connection, or name with --tree a process that has both ends below it"
    lost = [
        f"{', '.join(s.owners)}: to {s.peer or 'a process outside'} {s.remote}".rstrip()
        for s in streams
        if s.peer_inode
    ]
    hidden = [f"{', '.join(s.owners)}: other end not known" for s in streams if not s.peer_inode]
    if hidden and not lost:
        return unknown(expected, listing(hidden), hint)
    return none_of(lost, expected=expected, hint=hint, fine="they are")


def _pipe_outside(facts: DumpFacts) -> Judgement:
    keys = _stdio_keys(facts)
    found = [
        f"{', '.join(pipe.owners)}: pipe to {pipe.peer or 'a process outside'}"
        for pipe in facts.tree.pipes
        if not pipe.inside and f"pipe:[{pipe.inode}]" not in keys
    ]
    hint = "name with --tree the process that has both ends below it (mostly the parent), or start the job without it"
    return none_of(found, expected="both ends of pipes inside the tree", hint=hint, fine="they are")


def stdio_options(entries: tuple[Stdio, ...]) -> str:
    """'--stdin FILE --stdout FILE' for these entries."""
    names = {0: "--stdin", 1: "--stdout", 2: "--stderr"}
    return " ".join(f"{names[fd]} FILE" for fd in sorted({entry.fd for entry in entries}) if fd in names)


def needs_terminal(tree: Tree) -> bool:
    """The job has a terminal of others open: it cannot come back without one.

    A job that merely belongs to a terminal's session (`nohup JOB </dev/null >LOG 2>&1 &`) can.
    """
    if any(entry.kind == "tty" for entry in tree.outside_stdio):
        return True
    opened = (descriptor.target for process in tree.processes for descriptor in process.descriptors)
    return tree.surroundings.has_terminal and "/dev/tty" in opened


def restore_needs(tree: Tree) -> str:
    """'--stdout FILE, or --wait': what a restore must say about standard streams that lead out of the tree.

    A terminal's place can only be taken by another one, which --wait makes.
    """
    return "--wait" if needs_terminal(tree) else f"{stdio_options(tree.outside_stdio)}, or --wait"


def _stdio(facts: DumpFacts) -> Judgement | None:
    entries = facts.tree.outside_stdio
    if not entries:
        return None
    expected = "standard input and output that the image can hold"
    found = listing(
        f"fd {e.fd} is a {e.kind} to {e.peer or 'a process outside'} ({', '.join(e.holders)})" for e in entries
    )
    needs = f"the restore will need {restore_needs(facts.tree)}"
    if facts.request.leave_running:
        return failed(expected, found, f"nothing now; {needs}", "note")
    # Without a parent but init no tree has both ends.
    parent = facts.tree.processes[0].ppid
    bereft = tuple(dict.fromkeys(_bereft(entry) for entry in entries if entry.kind != "tty"))
    if not bereft:
        return failed(expected, found, f"the job leaves its terminal when it ends; {needs}")
    together = f"; name the common parent with --tree to save both (the job's parent is {parent})" if parent > 1 else ""
    return failed(expected, found, f"{', '.join(bereft)}{together}; else {needs}")


def _bereft(entry: Stdio) -> str:
    """'27863 bash stays behind and loses its reader'."""
    lost = "other end" if entry.kind == "socket" else "writer" if entry.writable else "reader"
    return f"{entry.peer or 'the process at the other end'} stays behind and loses its {lost}"


def _watches(facts: DumpFacts) -> Judgement | None:
    expected = "no inotify watch on /proc or /sys"
    if facts.proc_watches is None:
        if not any(object_name(d.target) == "inotify" for _, d in _descriptors(facts) if d.kind == "anon"):
            return None
        return unknown(expected, "the watches could not be read", "see the inotify lines of /proc/PID/fdinfo/N")
    return none_of(facts.proc_watches, expected=expected, hint="make the job end the watch: CRIU cannot save it")


def _locks(facts: DumpFacts) -> Judgement | None:
    if not facts.tree.file_locks:
        return None
    hint = "nothing now; the restore takes the locks again, so nobody else may hold them then"
    return failed("no file locks", "the tree holds file locks", hint)


def _deleted(facts: DumpFacts) -> Judgement | None:
    deleted = [file for file in facts.tree.files if file.deleted and file.links == 0]
    if not deleted:
        return None
    # CRIU compares what is allocated with its limit, not the size.
    large = [file for file in deleted if file.blocks_bytes > GHOST_LIMIT_BYTES]
    if large:
        found = listing(f"{file.path} ({size(file.blocks_bytes)}; {', '.join(file.uses)})" for file in large)
        hint = "make the job close it, or truncate it through /proc/PID/fd/N if its content may go"
        return failed(f"no deleted file above {size(GHOST_LIMIT_BYTES)}", found, hint, "block")
    total = sum(file.blocks_bytes for file in deleted)
    found = listing(f"{file.path} ({size(file.blocks_bytes)})" for file in deleted)
    hint = f"nothing to do: they become part of the image and add {size(total)}"
    return failed("no deleted files in use", found, hint)


IO_URING: Check[DumpFacts] = Check("io-uring", "block", "no process uses io_uring", _io_uring, allowable=False)
DEVICES: Check[DumpFacts] = Check("devices", "block", "no device is open that CRIU cannot save", _devices)
KERNEL_OBJECTS: Check[DumpFacts] = Check(
    "kernel-objects",
    "block",
    "no perf, userfaultfd, landlock, secretmem, vsock or KVM object is in use",
    _kernel_objects,
    allowable=False,
)
TCP_OUTSIDE: Check[DumpFacts] = Check(
    "tcp-outside", "block", "no TCP connection leaves the tree, or --tcp says what to do", _tcp_outside
)
UNIX_OUTSIDE: Check[DumpFacts] = Check(
    "unix-outside", "block", "no unix stream connection leaves the tree", _unix_outside, allowable=False
)
PIPE_OUTSIDE: Check[DumpFacts] = Check(
    "pipe-outside", "block", "no pipe other than stdio leaves the tree", _pipe_outside
)
STDIO: Check[DumpFacts] = Check(
    "stdio", "warn", "no standard stream leads to a process or terminal that stays behind", _stdio
)
WATCHES: Check[DumpFacts] = Check(
    "inotify", "block", "no inotify watch lies on /proc or /sys", _watches, allowable=False
)
LOCKS: Check[DumpFacts] = Check("file-locks", "note", "file locks that the restore must take again", _locks)
DELETED: Check[DumpFacts] = Check(
    "deleted-files", "note", "deleted files that become part of the image; up to 1 GiB each", _deleted, allowable=False
)

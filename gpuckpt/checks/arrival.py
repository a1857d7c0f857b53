"""Checks of what a restored tree takes on its host: numbers, ports, addresses, memory, standard streams."""

from __future__ import annotations

from gpuckpt.checks.check import Check, Judgement, failed, listing, none_of, passed, size, unknown
from gpuckpt.checks.facts import RestoreFacts, needed_sockets, outside_connections
from gpuckpt.checks.gpu_restore import memory_by_gpu
from gpuckpt.checks.image import memory_bytes
from gpuckpt.checks.objects import needs_terminal, stdio_options
from gpuckpt.model.facts import Stdio, Tree

OPTION_OF_FD = {0: "--stdin", 1: "--stdout", 2: "--stderr"}


def _pids(facts: RestoreFacts) -> Judgement:
    expected = "every pid, thread id, group and session of the tree free"
    if facts.request.own_pids:
        return passed(expected, "the tree gets a pid namespace of its own")
    taken = [f"{number} by {who}" for number, who in sorted(facts.ids_in_use.items())]
    if facts.manifest.left_running:
        hint = "the image was made with --leave-running: end the original (or what has its pids) first"
    else:
        hint = "end what has them; a zombie goes when its parent reaps it: repeat the command in a few seconds"
        if any("zombie of 1 " in who for who in facts.ids_in_use.values()):
            hint += " (never where process 1 reaps nothing: start such a container with an init)"
    if facts.contents is None:  # a migration's tree keeps its pids
        hint += ", or say --isolate pid: the tree then has pids of its own"
    return none_of(taken, expected=expected, hint=hint, fine="free")


def _ports(facts: RestoreFacts) -> Judgement | None:
    if not facts.ports_in_use and not needed_sockets(facts.manifest, facts.tcp):
        return None
    taken = [f"{port} by {who}" for port, who in sorted(facts.ports_in_use.items())]
    hint = "stop what has them, or give the tree others with --port OLD=NEW, or a network of its own with --isolate net"
    return none_of(taken, expected="every port of the tree free", hint=hint, fine="free")


def _addresses(facts: RestoreFacts) -> Judgement | None:
    if not needed_sockets(facts.manifest, facts.tcp):
        return None
    hint = "give this host the address (ip address add ADDRESS dev DEVICE)"
    if facts.request.own_network:
        hint = "name a network namespace that has it (ip -n NAME address add ADDRESS dev DEVICE; --netns NAME)"
    if outside_connections(facts.tree) and facts.tcp != "close":
        hint += ", or say --tcp close, if only connections have it"
    where = "in that network" if facts.request.own_network else "on this host"
    missing = (f"{address} is not {where}" for address in facts.missing_addresses)
    return none_of(missing, expected="every address that sockets of the tree are bound to", hint=hint, fine="here")


def _tcp(facts: RestoreFacts) -> Judgement | None:
    connections = outside_connections(facts.tree)
    if not connections:
        return None
    found = listing(f"{', '.join(s.owners)}: {s.local} to {s.remote}" for s in connections)
    expected = "a decision about TCP connections that leave the tree"
    if facts.tcp == "close":
        return passed(expected, f"closed: {found}")
    if facts.tcp == "keep":
        hint = "nothing, if the other end still waits; else --tcp close lets the job see the end at once"
        return unknown("the other end of kept TCP connections still waits", found, hint, "note")
    return failed(expected, found, "say --tcp close, or --tcp keep if the other end still waits")


def _stdio(facts: RestoreFacts) -> Judgement | None:
    request = facts.request
    # CRIU restores a terminal's settings, so nothing but a terminal can take its place: see needs_terminal.
    entries = _replaceable(facts.tree)
    if not entries:
        return None
    expected = "a place for each standard stream that led out of the tree"
    if request.wait:
        return passed(expected, "--wait: gpuckpt's own")
    lost = tuple(entry for entry in entries if entry.fd not in request.stdio)
    if not lost:
        return passed(expected, "each has one")
    hint = f"say {stdio_options(lost)} (/dev/null will do), or --wait to use gpuckpt's own"
    return failed(expected, listing(f"fd {e.fd} was a {e.kind} to {e.peer or 'a process outside'}" for e in lost), hint)


def _stdio_used(facts: RestoreFacts) -> Judgement | None:
    if not facts.request.stdio:
        return None
    outside = {entry.fd for entry in _replaceable(facts.tree)}
    idle = [f"{OPTION_OF_FD[fd]} {path}" for fd, path in sorted(facts.request.stdio.items()) if fd not in outside]
    hint = (
        "leave it out: that stream is a file or a terminal, lies inside the tree, or is one with another (2>&1), "
        "which it follows"
    )
    return none_of(idle, expected="only streams that led out of the tree are replaced", hint=hint, fine="so it is")


def _replaceable(tree: Tree) -> tuple[Stdio, ...]:
    return tuple(entry for entry in tree.outside_stdio if entry.kind != "tty")


def _terminal(facts: RestoreFacts) -> Judgement | None:
    if not needs_terminal(facts.tree):
        return None
    expected = "a terminal for the job, which has one open"
    if facts.request.wait:
        return passed(expected, "--wait gives it one")
    hint = (
        "say --wait: gpuckpt then keeps a terminal open as long as the job runs (in tmux or screen it outlives your "
        "session); no file can take a terminal's place"
    )
    return failed(expected, "without --wait it gets none", hint)


def _memory(facts: RestoreFacts) -> Judgement:
    need = facts.manifest.bytes_raw
    if not need:
        need = memory_bytes(facts.tree) + sum(memory_by_gpu(facts.manifest).values())
    expected = f"{size(need)} of free memory"
    hint = "free memory here, or raise the limit of the cgroup the tree will live in"
    free = facts.free_memory_bytes
    if free is None:
        return unknown(expected, "it is not known how much is free", hint)
    return passed(expected, f"{size(free)} free") if free >= need else failed(expected, f"{size(free)} free", hint)


def _locks(facts: RestoreFacts) -> Judgement | None:
    if not facts.tree.file_locks:
        return None
    hint = "nothing, if nobody else uses the files; else end what holds the locks (see /proc/locks)"
    return unknown("the file locks of the tree are free", "not looked at", hint)


PIDS_FREE: Check[RestoreFacts] = Check(
    "pids-free", "block", "the tree's pids, threads and sessions are free", _pids, allowable=False
)
PORTS_FREE: Check[RestoreFacts] = Check("ports-free", "block", "the tree's ports are free", _ports, allowable=False)
ADDRESSES: Check[RestoreFacts] = Check(
    "addresses", "block", "the tree's addresses are on this host", _addresses, allowable=False
)
TCP_DECIDED: Check[RestoreFacts] = Check(
    "tcp-outside", "block", "it is decided what becomes of connections that leave the tree", _tcp
)
STDIO_GIVEN: Check[RestoreFacts] = Check(
    "stdio", "block", "every standard stream that led outside has a place", _stdio, allowable=False
)
STDIO_USED: Check[RestoreFacts] = Check(
    "stdio-used", "warn", "--stdin, --stdout and --stderr replace something", _stdio_used
)
TERMINAL: Check[RestoreFacts] = Check("terminal", "block", "a job of a terminal gets one", _terminal, allowable=False)
HOST_MEMORY: Check[RestoreFacts] = Check("host-memory", "block", "there is memory for the tree", _memory)
LOCKS_FREE: Check[RestoreFacts] = Check("file-locks", "note", "file locks can be taken again", _locks)

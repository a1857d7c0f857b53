"""Checks of a restore into namespaces of its own, and of a clone: one of several trees from one image."""

from __future__ import annotations

import stat

from gpuckpt.checks.check import Check, Judgement, failed, listing, none_of, passed
from gpuckpt.checks.facts import (
    RestoreFacts,
    has_own_place,
    is_inet,
    needed_sockets,
    needed_unix_names,
    outside_connections,
    port_of,
)
from gpuckpt.checks.filechoice import writes
from gpuckpt.checks.fileplan import needed
from gpuckpt.checks.objects import needs_terminal

IDENTIFIERS = "identifiers it has made up (UUIDs, session and client ids), keys, and the state of random generators"


def _network(facts: RestoreFacts) -> Judgement | None:
    name = facts.request.named_network
    if name is None:
        return None
    hint = f"ip netns add {name}, and give it a link and an address; `ip netns list` shows those that are here"
    expected = f"a network namespace {name}"
    return passed(expected, "here") if facts.network_exists else failed(expected, "there is none of that name", hint)


def _terminal(facts: RestoreFacts) -> Judgement | None:
    if not facts.request.own_pids or not needs_terminal(facts.tree):
        return None
    hint = "restore it without --isolate pid and --clone, or start the job without a terminal: setsid JOB </dev/null"
    return failed("a job without a terminal, for a pid namespace", "it has one open", hint)


def _moved_ports(facts: RestoreFacts) -> Judgement | None:
    ports = facts.request.ports
    if not ports:
        return None
    here = {port_of(one.local) for one in needed_sockets(facts.manifest, facts.tcp) if is_inet(one)}
    kept = {port_of(one.local) for one in outside_connections(facts.tree)} if facts.tcp != "close" else set()
    wrong = [f"nothing of the tree is bound to {old}" for old in ports if old not in here]
    wrong += [f"a connection to outside goes on at {old}" for old in ports if old in kept]
    hint = "`gpuckpt inspect IMAGE` lists its sockets; say --tcp close where connections stand in the way"
    fine = listing(f"{old} becomes {new}" for old, new in ports.items())
    return none_of(wrong, expected="--port names ports of the tree that can be others", hint=hint, fine=fine)


def _unix_names(facts: RestoreFacts) -> Judgement | None:
    if not needed_unix_names(facts.manifest):
        return None
    taken = [f"{name} by {who}" for name, who in sorted(facts.unix_names_in_use.items())]
    hint = "stop what has them: the tree would take the names away from it"
    if any(name.startswith("@") for name in facts.unix_names_in_use):
        hint += "; those that begin with @ are free in a network of its own (--isolate net)"
    return none_of(taken, expected="names of the tree's unix sockets that nobody listens at", hint=hint, fine="free")


def _connections(facts: RestoreFacts) -> Judgement | None:
    if not facts.request.clone or not outside_connections(facts.tree):
        return None
    expected = "no connection to outside that several clones would share"
    if facts.tcp == "close":
        return passed(expected, "they are closed")
    return failed(expected, f"--tcp {facts.tcp}", "say --tcp close: the other end can only speak with one of them")


def _shared_memory(facts: RestoreFacts) -> Judgement | None:
    if not facts.request.clone:
        return None
    saved = {captured.path for captured in facts.manifest.captured}
    missing = [
        file.path
        for file in facts.tree.files
        if has_own_place(facts, file.path) and not file.deleted and file.path not in saved
    ]
    hint = "make the image with --capture-files writable, so that each clone has them for itself"
    return none_of(missing, expected="the tree's files in /dev/shm, in the image", hint=hint, fine="an own /dev/shm")


def _shared_files(facts: RestoreFacts) -> Judgement | None:
    if not facts.request.clone:
        return None
    shared = [file.path for file in needed(facts) if stat.S_ISREG(file.mode) and writes(file)]
    hint = "nothing, where each clone only appends; else clones write over each other: start it with files of its own"
    return none_of(shared, expected="no file that several clones write to", hint=hint, fine="none")


def _identity(facts: RestoreFacts) -> Judgement | None:
    if not facts.request.clone:
        return None
    hint = (
        "let --post-restore give it new ones: GPUCKPT_CLONE_ID (in the report: clone_id) is another for each clone; "
        "its own environment is that of the dump"
    )
    return failed("clones that can be told apart", f"each has the same {IDENTIFIERS}", hint)


NETWORK: Check[RestoreFacts] = Check(
    "netns", "block", "the network namespace of that name is here", _network, allowable=False
)
TERMINAL_INSIDE: Check[RestoreFacts] = Check(
    "isolated-terminal", "block", "a job with a terminal gets no pid namespace", _terminal, allowable=False
)
PORTS_MOVED: Check[RestoreFacts] = Check(
    "ports-moved", "block", "--port names ports that the tree is bound to", _moved_ports, allowable=False
)
UNIX_NAMES: Check[RestoreFacts] = Check(
    "unix-names", "block", "nobody else has the names of the tree's unix sockets", _unix_names
)
CLONE_TCP: Check[RestoreFacts] = Check(
    "clone-tcp", "block", "a clone has no connection that others have too", _connections, allowable=False
)
CLONE_MEMORY: Check[RestoreFacts] = Check(
    "clone-memory", "block", "what a clone has in /dev/shm is in the image", _shared_memory, allowable=False
)
CLONE_FILES: Check[RestoreFacts] = Check("clone-files", "warn", "clones do not write to the same files", _shared_files)
CLONE_IDENTITY: Check[RestoreFacts] = Check(
    "clone-identity", "warn", "clones can be told apart by what they have in memory", _identity
)

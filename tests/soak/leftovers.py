"""What must not stay: processes, and things of the host that lie outside of a run's directory."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import socket
import struct
from collections.abc import Collection, Iterator
from pathlib import Path

from gpuckpt.system import netfilter
from tests import harness
from tests.faults import arena

OURS = ("gpuckpt.owner.process", "-m gpuckpt", "--action-script", "gate_client")

SPOTS = (
    ("/var/lib/gpuckpt", "gpuckpt-gate-*"),
    ("/root", "gpuckpt-gate-*"),
    ("/var/tmp", "gpuckpt-gate-*"),
    ("/dev/shm", f"gpuckpt-{'[0-9a-f]' * 8}"),
)
"""Where a run may put something outside of its directory, named by the run."""


def busy(tree: Collection[int]) -> list[str]:
    """Owners, CRIUs and their scripts below us that have not ended; a restored tree stays."""
    below = (pid for pid in arena.descendants(os.getpid()) if pid not in tree)
    return [f"{pid} {words}" for pid in below if any(word in (words := arena.command_of(pid)) for word in OURS)]


CLONE_NEWNET = 0x40000000
SIOCSIFFLAGS, IFF_UP = 0x8914, 1


@contextlib.contextmanager
def own_network() -> Iterator[None]:
    """A network namespace of our own, and of all that we start: CRIU's locks in it are those of our runs alone."""
    libc, before = ctypes.CDLL(None, use_errno=True), os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    try:
        if libc.unshare(CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), "unshare")
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
            fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sh", b"lo", IFF_UP))
        yield
    finally:
        libc.setns(before, CLONE_NEWNET)
        os.close(before)


def host_wide() -> frozenset[str]:
    """What no run may leave on the host: CRIU's network locks, gate scripts and memory files of runs that are over."""
    found = {path for place, name in SPOTS for path in Path(place).glob(name)}
    runs = {path.name for path in arena.RUNS.glob("*")}
    orphans = {str(path) for path in found if path.name.rpartition("-")[2] not in runs}
    with contextlib.suppress(OSError):
        orphans |= {table.name for table in netfilter.list_tables() if table.name.startswith("CRIU-")}
    return frozenset(orphans)


def reap_orphans() -> None:
    """Owners and CRIUs whose main was killed became our children; no run of ours is at work now."""
    for pid in arena.children(os.getpid()):
        if harness.state(pid) == "Z":
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)

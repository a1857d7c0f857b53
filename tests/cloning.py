"""What tests of clones and isolated restores share: an engine that serves, asked from wherever it is."""

from __future__ import annotations

import contextlib
import json
import socket
from pathlib import Path

from gpuckpt.system import namespaces
from tests import harness
from tests.harness import Jobs


def ask(port: int, host: str = "127.0.0.1", pid: int | None = None) -> dict:
    """One answer of tests/programs/server.py, which has read all of its memory for it; in the network of `pid`."""

    def call() -> dict:
        with socket.create_connection((host, port), timeout=60) as connection:
            said = json.loads(connection.makefile().readline())
        assert said["memory"] == "whole", said
        return said

    return call() if pid is None else namespaces.in_network(Path(f"/proc/{pid}/ns/net"), call)


def serves(port: int, pid: int | None = None) -> bool:
    """Something answers there."""
    with contextlib.suppress(OSError):
        return bool(ask(port, pid=pid))
    return False


def free_port() -> int:
    """A port that nobody has here."""
    with socket.socket() as trial:
        trial.bind(("0.0.0.0", 0))
        return trial.getsockname()[1]


def start(jobs: Jobs, port: int, name: str = "none", megabytes: int = 1) -> int:
    """A server that serves."""
    job = jobs.python("server.py", port, name, megabytes)
    harness.wait_for(lambda: serves(port), "the server serves")
    return job.pid


def inside(init: int) -> set[int]:
    """Pids, as we see them, of all that live in the pid namespace of a process."""
    wanted = Path(f"/proc/{init}/ns/pid")
    try:
        namespace = wanted.readlink()
    except OSError:
        return set()
    found = set()
    for place in Path("/proc").glob("[0-9]*/ns/pid"):
        with contextlib.suppress(OSError):
            if place.readlink() == namespace:
                found.add(int(place.parts[2]))
    return {pid for pid in found if harness.alive(pid)}


def mounts(pid: int) -> str:
    """What a process sees mounted; '' when it is gone."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/mountinfo").read_text()
    return ""

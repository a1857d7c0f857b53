"""restore user@host:/path: the image lies elsewhere, its memory goes from the wire into the held tree."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import harness
from tests.e2e import rounds
from tests.harness import Answer, gpuckpt
from tests.sshd import REMOTE_COMMAND

pytestmark = pytest.mark.criu

MIB = 1 << 20
SPOOLS = Path("/run/gpuckpt/spools")


def reach(sshd, host="far", config=None) -> list[object]:
    command = [] if host == "bare" else ["--remote-command", REMOTE_COMMAND]
    return ["--ssh-config", config or sshd.config, *command]


def restore(jobs, sshd, image: Path, *options, host="far", config=None, **how) -> Answer:
    """A restore over the wire that must work."""
    answer = gpuckpt("restore", f"{host}:{image}", *reach(sshd, host, config), *rounds.SETTLE, *options, **how)
    jobs.adopt(*answer.report["data"].get("pids", ()))
    assert (answer.status, answer.report["process"]) == (0, "restored"), rounds.explain(answer)
    return answer


def dumped(jobs, work, kind="private", megabytes=96) -> int:
    """Save a program whose memory says whether it is what it was; returns its last number."""
    job = jobs.python("memory.py", kind, work / "log", megabytes)
    harness.wait_for_count(work / "log", 1)
    rounds.dump(jobs, job.pid, work / "image")
    return harness.numbers(work / "log")[-1]


def stored_here() -> list[Path]:
    """What lies in spools, and pages made for CRIU."""
    return [*SPOOLS.glob("*"), *Path("/dev/shm").glob("gpuckpt-*")]


@pytest.mark.parametrize("host", ["far", "bare"])
def test_memory_goes_from_the_wire_into_the_tree(work, jobs, sshd, host):
    at_dump = dumped(jobs, work)
    answer = restore(jobs, sshd, work / "image", "--connections", 3, "--bwlimit", "25M", host=host)
    data = answer.report["data"]
    assert data["image"] == f"{host}:{work}/image"
    assert data["bytes_injected"] > 40 * MIB
    assert data["connections"] == 3
    assert data["bytes_fetched"] > 40 * MIB
    rounds.goes_on(work / "log", at_dump, more=2)
    assert stored_here() == []

"""Every kind of process goes on from its image: its own count proves that all it talks through came back."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests import harness
from tests.e2e import rounds

pytestmark = pytest.mark.criu


@pytest.fixture
def argument(work, request):
    """What a kind gets as its argument: a directory of its own, a name, a way to start processes."""
    given = request.param
    if given == "DIR":
        (work / "dir").mkdir()
        return work / "dir"
    return work / "gone" if given == "NEW" else given


@pytest.mark.parametrize(
    ("kind", "argument"),
    [
        ("ring", ""),
        ("hundred", ""),
        ("threads", ""),
        ("shared", ""),
        ("memfd", ""),
        ("deleted", "DIR"),
        ("pool", "spawn"),
        ("pool", "forkserver"),
        ("terminal", ""),
        ("cwd", "DIR"),
        ("cwd_gone", "NEW"),
        ("cow", ""),
        ("locks", "DIR"),
        ("events", ""),
    ],
    indirect=["argument"],
)
def test_it_goes_on_where_it_stopped(work, jobs, kind, argument):
    job = jobs.python("kinds.py", kind, work / "log", argument)
    harness.wait_for_count(work / "log", 3)
    dumped = rounds.dump(jobs, job.pid, work / "img")
    at_dump = harness.numbers(work / "log")[-1]
    restored = rounds.restore(jobs, work / "img")
    assert restored.report["data"]["pids"] == dumped.report["data"]["pids"]
    rounds.goes_on(work / "log", at_dump)
    if kind == "pool":
        # Its own end removes its semaphores' names: the restored resource tracker must still know them.
        os.kill(job.pid, signal.SIGINT)
        rounds.await_end(jobs, restored.report["data"]["pids"])
        names = [one["linked_to"] for one in rounds.manifest(work / "img")["captured"]]
        assert not [name for name in names if name and os.path.exists(name)]


def test_children_still_share_their_parents_memory(work, jobs):
    """Copy-on-write pages stay shared: else a job of many workers would need many times its memory."""
    job = jobs.python("kinds.py", "cow", work / "log")
    harness.wait_for_count(work / "log", 2)
    rounds.dump(jobs, job.pid, work / "img")
    _, child, _ = rounds.restore(jobs, work / "img").report["data"]["pids"]
    smaps = Path(f"/proc/{child}/smaps_rollup").read_text().splitlines()
    shared = sum(int(line.split()[1]) for line in smaps if line.startswith(("Shared_Clean", "Shared_Dirty")))
    anonymous = next(int(line.split()[1]) for line in smaps if line.startswith("Anonymous:"))
    assert anonymous > 16_000_000 // 1024
    assert shared > 12_000_000 // 1024

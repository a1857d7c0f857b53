"""Every kind of process goes on from its image: its own count proves that all it talks through came back."""

from __future__ import annotations

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

"""What is said of a tree in which CRIU died, looked at through /proc of real processes."""

from __future__ import annotations

import contextlib
import os
import signal
import socket

import pytest

from gpuckpt.model.facts import GpuDriver
from gpuckpt.owner.journal import Journal
from gpuckpt.owner.messages import Channel, RepairOrder, TreeOrder
from gpuckpt.owner.repairing import repair
from gpuckpt.owner.unwind import Means, doubted, unwind
from gpuckpt.system import procfs
from tests import harness


def stopped_tree(jobs) -> TreeOrder:
    root, child = (procfs.process_id(jobs.start("sleep", 1000).pid) for _ in range(2))
    os.kill(child.pid, signal.SIGSTOP)
    harness.wait_for(lambda: procfs.state(child) == "T", "it is stopped")
    return TreeOrder(root, (root, child), stopped=(child,))


def test_what_stood_before_is_as_before(jobs, tmp_path):
    tree = stopped_tree(jobs)
    seen = unwind(tree, Means(None, Journal(tmp_path), GpuDriver))
    assert (seen.state, [one.state for one in seen.seen]) == ("running", ["running", "running"])


def test_nobody_knows_of_a_stopped_process_in_which_criu_died(jobs, tmp_path):
    tree = stopped_tree(jobs)
    unwound = unwind(tree, Means(None, Journal(tmp_path), GpuDriver), criu_died=True)
    assert unwound.state == "running"  # for a repair later on, which must be able to clear the run away
    seen = doubted(unwound, tree)
    assert (seen.state, [one.state for one in seen.seen]) == ("frozen", ["running", "frozen"])
    assert "may end when it goes on" in seen.seen[1].detail
    assert procfs.state(tree.stopped[0]) == "T"


@pytest.mark.parametrize(
    ("where", "log", "state"),
    [
        # No word of how it ended: it was killed.
        ("run/repair", "Dumping core\n", "frozen"),
        ("another/repair", "Dumping core\n", "running"),
        # The owner was killed when it had just started CRIU, which never came to the tree.
        ("run/repair", None, "running"),
    ],
)
def test_who_repairs_at_once_says_it_too(jobs, tmp_path, where, log, state):
    """Owner and CRIU were killed: main's own repair tells the person; a later run's must be able to clear it away."""
    tree = stopped_tree(jobs)
    run, own = tmp_path / "run", tmp_path / where
    own.mkdir(parents=True)
    run.mkdir(exist_ok=True)
    criu = jobs.start("true")
    criu.wait()
    Journal(run).write("criu-started", pid=criu.pid, start_ticks=1)
    if log is not None:
        (run / "criu.log").write_text(log)
    ours, theirs = (Channel(one) for one in socket.socketpair())
    with contextlib.closing(ours), contextlib.closing(theirs):
        repair(RepairOrder(str(own), str(run), tree, None), theirs, Means(None, Journal(own), GpuDriver))
        said = ours.receive(1.0)
    assert said is not None and said["state"] == state
    assert procfs.state(tree.stopped[0]) == "T"

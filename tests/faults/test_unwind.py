"""What is said of a tree in which CRIU died, looked at through /proc of real processes."""

from __future__ import annotations

import os
import signal

from gpuckpt.model.facts import GpuDriver
from gpuckpt.owner.journal import Journal
from gpuckpt.owner.messages import TreeOrder
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

"""What is written down of a tree at the gate must be what stood still there."""

from __future__ import annotations

import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from gpuckpt.flows import composing, gather
from gpuckpt.images import criuformat
from gpuckpt.model.errors import DumpFailed, ImageCorrupt
from gpuckpt.model.facts import ProcessId
from gpuckpt.system import procfs
from tests import harness

RECORDED = Path(__file__).parents[1] / "data" / "criu-4.2.1" / "tcp"


def test_a_tree_that_moves_is_not_described(jobs):
    """Seen: CRIU was killed at the gate, the tree ended while it was read, and the image knew no build-id of it."""
    job = jobs.start("sleep", 1000)
    root = procfs.process_id(job.pid)
    before = procfs.read_tree(root)
    with pytest.raises(DumpFailed, match="did not stand still"):
        gather.tree_at_rest(before, keep_argv=False)
    os.kill(job.pid, signal.SIGSTOP)
    harness.wait_for(lambda: harness.state(job.pid) == "T", "it stops")
    assert gather.tree_at_rest(before, keep_argv=False).files == procfs.read_tree(root).files


def test_a_process_that_the_image_holds_alive_has_not_ended_since(tmp_path, jobs):
    """CRIU was killed, and its end took a child along, before anybody read what the child had open."""
    shutil.copy(RECORDED / "pstree.img", tmp_path)
    in_image = criuformat.read_process_list(tmp_path / "pstree.img")
    sleeping = procfs.read_tree(procfs.process_id(jobs.start("sleep", 1000).pid))
    root, child = (replace(sleeping.processes[0], id=ProcessId(one.pid, 1)) for one in in_image)
    tree = replace(sleeping, root=root.id, processes=(root, replace(child, exe="")))
    (tmp_path / f"mm-{root.pid}.img").touch()
    composing.refuse_other_processes(tmp_path, tree)  # a zombie: CRIU saved no memory of it
    (tmp_path / f"mm-{child.pid}.img").touch()
    composing.refuse_other_processes(tmp_path, replace(tree, processes=(root, child)))
    with pytest.raises(ImageCorrupt, match=f"changed while it was dumped .processes {child.pid}"):
        composing.refuse_other_processes(tmp_path, tree)

"""Which working directories are walked for --carry-files, and how much may lie below them."""

from __future__ import annotations

import os
import pwd

import pytest

from gpuckpt.flows import workdirs
from gpuckpt.model.errors import Refused
from gpuckpt.system import procfs
from tests import harness


@pytest.mark.parametrize("path", ["/srv/app", "/home/ann/job", "/var/lib/job", "/opt/app/run", "/tmp/job"])
def test_the_job_s_own_directory_is_walked(path):
    assert workdirs.why_not(path, {0}) == ""


@pytest.mark.parametrize(
    "path", ["/", "/srv", "/tmp", "/root", "/home/ann", "/var/lib", "/usr/lib/x", "/etc/app", "/run/x"]
)
def test_what_every_host_has_is_not(path):
    assert workdirs.why_not(path, {0})


def test_a_home_directory_is_not_wherever_it_lies():
    user = next(one for one in pwd.getpwall() if not workdirs.why_not(one.pw_dir, set()))
    assert workdirs.why_not(user.pw_dir, {user.pw_uid}) == "it is a home directory itself"


@pytest.fixture
def tree(work, jobs):
    """A tree that works in `work`."""
    for name in ("one", "two", "three.log", "inner/four.log", "image.partial/five", "image-seed/six", "image2/seven"):
        (work / name).parent.mkdir(exist_ok=True)
        (work / name).write_text(name)
    pid = jobs.start("/bin/sleep", "1000", cwd=work).pid
    return procfs.read_tree(procfs.process_id(pid), keep_argv=False)


def look(tree, work, *words):
    """Names below `work` that go along."""
    (below,) = workdirs.look(tree, words, str(work / "image"), lambda: None)
    return sorted(os.path.relpath(one.path, work) for one in below.files), below


def test_words_and_patterns_choose_and_an_image_that_grows_there_does_not_go_along(tree, work):
    assert look(tree, work, "all")[0] == ["image2/seven", "inner/four.log", "one", "three.log", "two"]
    assert look(tree, work, f"{work}/*.log")[0] == ["inner/four.log", "three.log"]
    assert look(tree, work, str(work / "one"))[0] == ["one"]
    assert workdirs.look(tree, ("writable",), str(work / "image"), lambda: None) == ()


def test_too_many_are_refused_with_what_to_do(tree, work, monkeypatch):
    monkeypatch.setattr(workdirs, "MOST_ENTRIES", 3)
    with pytest.raises(Refused, match="more than 3 files") as refused:
        look(tree, work, "all")
    assert "rsync" in refused.value.hint


def test_a_job_below_a_home_directory_is_walked_although_another_one_works_in_that(work, jobs, monkeypatch):
    (work / "job").mkdir()
    (work / "job" / "one").write_text("one")
    monkeypatch.setattr(workdirs, "_home", lambda _uid: str(work))
    shell = jobs.start("/bin/sh", "-c", "cd job && exec /bin/sleep 1000 & wait", cwd=work)
    root = procfs.process_id(shell.pid)
    harness.wait_for(lambda: len(procfs.tree_ids(root)) == 2, "its child is there")
    child = procfs.tree_ids(root)[1].pid
    harness.wait_for(lambda: os.readlink(f"/proc/{child}/cwd") == str(work / "job"), "it works in its own directory")
    home, job = workdirs.look(procfs.read_tree(root, keep_argv=False), ("all",), str(work / "image"), lambda: None)
    assert (home.path, bool(home.why_not)) == (str(work), True)
    assert [one.path for one in job.files] == [str(work / "job" / "one")]

"""A restored tree stands by itself: it outlives what ran the command. And the command runs where cron runs it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from gpuckpt.system import procfs
from tests import harness
from tests.e2e import rounds, starting

pytestmark = pytest.mark.criu

CRON = {"PATH": "/usr/bin:/bin", "HOME": "/", "SHELL": "/bin/sh", "LOGNAME": "root"}

needs_cgroup2 = pytest.mark.skipif(procfs.cgroup_kind() == "none", reason="needs cgroup v2")


@pytest.fixture
def image(work, jobs):
    """A dumped tree of four processes."""
    job = jobs.python("kinds.py", "ring", work / "log")
    harness.wait_for_count(work / "log", 2)
    rounds.dump(jobs, job.pid, work / "img")
    return work / "img"


@needs_cgroup2
def test_it_has_a_cgroup_of_its_own(work, jobs, image):
    restored = rounds.restore(jobs, image)
    root, pids = restored.report["data"]["root_pid"], restored.report["data"]["pids"]
    own = restored.report["data"]["cgroup"]
    assert f"{root}-" in own
    assert {procfs.unified_cgroup_of(pid) for pid in pids} == {own}
    assert procfs.unified_cgroup_of(os.getpid()) != own


@needs_cgroup2
def test_cgroups_of_trees_that_have_ended_go_at_the_next_restore(work, jobs, image):
    parent = Path(procfs.cgroup2_mount()) / "gpuckpt"
    old, fresh = parent / f"test-old-{os.getpid()}", parent / f"test-fresh-{os.getpid()}"
    for path in (old, fresh):
        path.mkdir(parents=True)
    os.utime(old, (0, 0))
    rounds.restore(jobs, image)
    assert not old.exists()
    fresh.rmdir()


@pytest.fixture
def cgroup(work):
    """A cgroup such as a oneshot unit or a batch step has; its end takes all along that is in it."""
    mount = procfs.cgroup2_mount()
    path = Path(mount) / f"gpuckpt-test-{os.getpid()}"
    path.mkdir()
    yield path
    (path / "cgroup.kill").write_text("1")
    harness.wait_for(lambda: not (path / "cgroup.procs").read_text(), "the cgroup is empty")
    path.rmdir()


@needs_cgroup2
def test_it_outlives_the_session_and_the_cgroup_of_the_command(work, jobs, image, cgroup):
    at_dump = harness.numbers(work / "log")[-1]
    command = " ".join(starting.GPUCKPT)
    line = f"echo 0 >{cgroup}/cgroup.procs; {command} restore {image} --settle 0.2; echo $?; exec sleep 1000"
    session = jobs.start("/bin/sh", "-c", line, stdout=subprocess.PIPE, text=True)
    assert session.stdout.readline() == "0\n"
    session.stdout.close()
    jobs.adopt(*(process["id"]["pid"] for process in rounds.manifest(image)["tree"]["processes"]))
    os.killpg(session.pid, signal.SIGHUP)
    os.killpg(session.pid, signal.SIGKILL)
    (cgroup / "cgroup.kill").write_text("1")
    session.wait(10)
    rounds.goes_on(work / "log", max(at_dump, harness.numbers(work / "log")[-1]))


def test_cron_hears_nothing_of_a_success(work, jobs):
    job = jobs.python("counter.py", work / "log")
    harness.wait_for_count(work / "log", 2)
    for options in (["--leave-running", str(work / "first")], [str(work / "second")]):
        with rounds.reaping(jobs):
            assert run_by_cron("dump", "--tree", str(job.pid), *options) == (0, "", "")
    rounds.await_end(jobs, [job.pid])
    at_dump = harness.numbers(work / "log")[-1]
    jobs.adopt(job.pid)
    assert run_by_cron("restore", str(work / "second")) == (0, "", "")
    rounds.goes_on(work / "log", at_dump)


def test_cron_hears_why_when_it_failed(work, jobs):
    status, stdout, stderr = run_by_cron("restore", str(work / "nowhere"))
    assert (status, stdout) == (21, "")
    assert str(work / "nowhere") in stderr
    assert len(stderr.splitlines()) == 3, "one line each: what happened, why, what to do"


def run_by_cron(*arguments: str) -> tuple[int, str, str]:
    """gpuckpt as a line of a crontab: a short environment, no terminal, a session of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "gpuckpt", *arguments, "--settle", "0.2"],
        env=CRON,
        cwd="/",
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        start_new_session=True,
    )
    return done.returncode, done.stdout, done.stderr

"""Trees as they stand around: below a shell, stopped, left running, in several rounds, with files that others need."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from tests import harness
from tests.e2e import rounds
from tests.harness import PROGRAMS, gpuckpt

pytestmark = pytest.mark.criu

COUNTER = (sys.executable, PROGRAMS / "counter.py")


def child_of(shell: int) -> int:
    """The program that a shell has started."""
    return harness.wait_for(lambda: rounds.descendants(shell)[1:], f"a child of {shell}")[0]


def below_a_shell(jobs, log: Path, *, monitor: bool = False) -> tuple[int, int]:
    """A shell and the job it started: no session leader; with job control a group of its own."""
    line = f"{'set -m;' if monitor else ''} {COUNTER[0]} {COUNTER[1]} {log} & wait; exec sleep 1000"
    shell = jobs.start("/bin/sh", "-c", line)
    job = child_of(shell.pid)
    jobs.adopt(job)
    harness.wait_for_count(log, 2)
    return shell.pid, job


@pytest.mark.parametrize("monitor", [False, True], ids=["plain", "job control"])
def test_a_child_of_a_shell_goes_on_without_the_shell(work, jobs, monitor):
    _, job = below_a_shell(jobs, work / "log", monitor=monitor)
    assert os.getsid(job) != job
    dumped = rounds.dump(jobs, job, work / "img")
    assert rounds.manifest(work / "img")["criu"]["shell_job"] is True
    at_dump = harness.numbers(work / "log")[-1]
    assert dumped.report["data"]["pids"] == [job]
    rounds.restore(jobs, work / "img")
    rounds.goes_on(work / "log", at_dump)


@pytest.mark.parametrize("shell", [False, True], ids=["own session", "child of a shell"])
def test_a_stopped_job_comes_back_stopped_and_goes_on_at_sigcont(work, jobs, shell):
    if shell:
        _, job = below_a_shell(jobs, work / "log")
    else:
        job = jobs.python("counter.py", work / "log").pid
        harness.wait_for_count(work / "log", 2)
    os.kill(job, signal.SIGSTOP)
    harness.wait_for(lambda: harness.state(job) == "T", "the job stops")
    rounds.dump(jobs, job, work / "img")
    at_dump = harness.numbers(work / "log")[-1]
    rounds.restore(jobs, work / "img")
    assert harness.state(job) == "T"
    assert harness.numbers(work / "log")[-1] == at_dump
    os.kill(job, signal.SIGCONT)
    rounds.goes_on(work / "log", at_dump)


def test_one_stopped_process_of_a_tree_stays_so_and_the_others_go_on(work, jobs):
    line = f"{COUNTER[0]} {COUNTER[1]} {work / 'runs'} & {COUNTER[0]} {COUNTER[1]} {work / 'stopped'} & wait"
    root = jobs.start("/bin/sh", "-c", line).pid
    for name in ("runs", "stopped"):
        harness.wait_for_count(work / name, 2)
    stopped = next(p for p in rounds.descendants(root)[1:] if str(work / "stopped") in command_line(p))
    os.kill(stopped, signal.SIGSTOP)
    harness.wait_for(lambda: harness.state(stopped) == "T", "it stops")
    rounds.dump(jobs, root, work / "img", "--leave-running")
    assert harness.state(stopped) == "T"
    harness.wait_for_count(work / "runs", harness.numbers(work / "runs")[-1] + 2)
    rounds.dump(jobs, root, work / "img2")
    at_dump = {name: harness.numbers(work / name)[-1] for name in ("runs", "stopped")}
    rounds.restore(jobs, work / "img2")
    rounds.goes_on(work / "runs", at_dump["runs"])
    assert harness.state(stopped) == "T"
    assert harness.numbers(work / "stopped")[-1] == at_dump["stopped"]
    os.kill(stopped, signal.SIGCONT)
    rounds.goes_on(work / "stopped", at_dump["stopped"])


def command_line(pid: int) -> str:
    """argv as text; '' when it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


def test_left_running_it_goes_on_and_its_image_restores_after_its_end(work, jobs):
    job = jobs.python("counter.py", work / "log")
    harness.wait_for_count(work / "log", 2)
    rounds.dump(jobs, job.pid, work / "img", "--leave-running")
    at_dump = harness.numbers(work / "log")[-1]
    rounds.goes_on(work / "log", at_dump)
    early = gpuckpt("restore", work / "img")
    assert "pids-free" in rounds.refused(early)
    assert harness.state(job.pid) in ("R", "S")
    job.kill()
    job.wait(10)
    (work / "log").rename(work / "first")  # the count begins anew in a file of its own: the cut must be in the image
    (work / "log").write_text("")
    os.chmod(work / "log", 0o644)
    rounds.restore(jobs, work / "img")
    harness.wait_for(lambda: len(harness.numbers(work / "log")) > 5, "it counts again")
    harness.assert_gapless(work / "log")
    # Between the cut and the moment we looked at most a few numbers were written.
    assert at_dump - 50 < harness.numbers(work / "log")[0] <= at_dump + 1


def test_three_rounds_count_their_generations(work, jobs):
    job = jobs.python("kinds.py", "ring", work / "log")
    harness.wait_for_count(work / "log", 2)
    parent = None
    for generation in (1, 2, 3):
        image = work / f"img{generation}"
        dumped = rounds.dump(jobs, job.pid, image)
        at_dump = harness.numbers(work / "log")[-1]
        assert rounds.manifest(image)["lineage"] == {"parent_image_id": parent, "generation": generation}
        parent = dumped.report["data"]["image_id"]
        rounds.restore(jobs, image)
        rounds.goes_on(work / "log", at_dump)


@pytest.fixture
def semaphores(request):
    """A name for semaphores of this test; what is left of them goes with it."""
    name = f"gpuckpt-test-{os.getpid()}"
    yield name
    for path in Path("/dev/shm").glob(f"sem.{name}-*"):
        path.unlink()


@pytest.mark.parametrize("named_here", [True, False], ids=["names still there", "after a reboot"])
def test_semaphores_come_back_although_criu_removed_their_files(work, jobs, semaphores, named_here):
    before = set(os.listdir("/dev/shm"))
    job = jobs.python("kinds.py", "semaphore", work / "log", semaphores)
    harness.wait_for_count(work / "log", 2)
    named = set(os.listdir("/dev/shm")) - before
    rounds.dump(jobs, job.pid, work / "img", "--leave-running")
    rounds.goes_on(work / "log", harness.numbers(work / "log")[-1])
    captured = [one["path"] for one in rounds.manifest(work / "img")["captured"] if one["reason"] == "link-remap"]
    assert captured
    assert not any(os.path.exists(path) for path in captured)
    tree = rounds.descendants(job.pid)
    job.kill()
    rounds.await_end(jobs, tree)
    if not named_here:
        for name in named:
            os.unlink(f"/dev/shm/{name}")
    (work / "log").write_text("")
    rounds.restore(jobs, work / "img")
    harness.wait_for(lambda: len(harness.numbers(work / "log")) > 5, "it counts again")
    rounds.goes_on(work / "log", harness.numbers(work / "log")[-1])
    assert set(os.listdir("/dev/shm")) - before == named, "link_remap files stayed"


def test_a_pool_that_was_dumped_leaves_no_files_behind(work, jobs):
    before = set(os.listdir("/dev/shm"))
    job = jobs.python("kinds.py", "pool", work / "log", "spawn")
    harness.wait_for_count(work / "log", 2)
    rounds.dump(jobs, job.pid, work / "img")
    assert not [name for name in set(os.listdir("/dev/shm")) - before if name.startswith("link_remap")]
    captured = rounds.manifest(work / "img")["captured"]
    assert captured
    for one in captured:
        Path(one["linked_to"]).unlink(missing_ok=True)  # the pool's own names, which only its own end removes


def test_a_tree_whose_processes_come_and_go_is_saved_as_it_stands_still(work, jobs):
    """A shell loop has a new child at every look: the image holds those of the freeze, not of the first look."""
    script = f"n=0; while sleep 0.05; do n=$((n + 1)); echo $n >> {work / 'log'}; done"
    pid = jobs.start("bash", "-c", script, cwd="/").pid
    for round_number in range(4):
        seen = harness.wait_for_count(work / "log", 3 + 10 * round_number)
        image = work / f"img{round_number}"
        dumped = gpuckpt("dump", "--tree", pid, image)
        assert dumped.status == 0, dumped
        jobs.reap()
        harness.wait_for(lambda: not Path(f"/proc/{pid}").exists(), "the loop's shell is gone")
        restored = gpuckpt("restore", image, "--settle", 0.2)
        assert restored.status == 0, restored
        jobs.adopt(*restored.report["data"]["pids"])
        harness.wait_for_count(work / "log", seen + 5)
    harness.assert_gapless(work / "log")

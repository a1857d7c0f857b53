"""Whether a restored tree serves again: a web service, a port that never opens, a job that dies on the way."""

from __future__ import annotations

import json
import os
import signal

import pytest

from tests import harness
from tests.e2e import rounds, starting
from tests.harness import gpuckpt, start_gpuckpt

pytestmark = pytest.mark.criu

NEVER = ("--ready-tcp", "127.0.0.1:9", "--ready-timeout", 1000)


@pytest.fixture
def service(work, jobs):
    """The image of a web service that answers 503; its address."""
    job = jobs.python("web.py", work)
    harness.wait_for((work / "port").exists, "it listens")
    rounds.dump(jobs, job.pid, work / "img")
    jobs.adopt(*rounds.manifest_pids(work / "img"))
    return f"127.0.0.1:{(work / 'port').read_text()}"


def test_a_service_is_ready_when_it_answers(work, jobs, service):
    """It comes up only after it was asked: the command that is tried brings it up the second time."""
    command = f"[ -e {work}/asked ] && touch {work}/up; touch {work}/asked; [ -e {work}/up ]"
    probes = ("--ready-tcp", service, "--ready-cmd", command, "--cold-start-seconds", 1000)
    data = rounds.restore(jobs, work / "img", *probes).report["data"]
    assert 0 < data["seconds"]["ready"] < data["ready_seconds"]
    assert 0 < data["restored_seconds"] < data["ready_seconds"]
    assert data["cold_start"] == {"seconds": 1000.0, "factor": pytest.approx(1000 / data["ready_seconds"])}
    os.kill(data["root_pid"], signal.SIGKILL)
    rounds.await_end(jobs, data["pids"])
    argv = ("restore", str(work / "img"), "--settle", "0", "--verbose", "--ready-http", f"http://{service}/health")
    done = starting.subprocess.run([*starting.GPUCKPT, *argv], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "; ready after " in done.stdout


def test_one_that_is_not_ready_in_time_runs_on_and_that_is_said(work, service):
    answer = gpuckpt(
        *("restore", work / "img", "--ready-http", f"http://{service}/", "--ready-timeout", 3),
        *("--post-restore", f"echo $GPUCKPT_OUTCOME $GPUCKPT_PROCESS >{work}/said"),
    )
    assert (answer.status, answer.report["process"]) == (41, "restored"), rounds.explain(answer)
    assert answer.error["message"].endswith(
        f"was not ready within 3 s: --ready-http http://{service}/: it answered 503"
    )
    assert (work / "said").read_text() == "failed restored\n"
    assert harness.alive(rounds.manifest_pids(work / "img")[0])


def test_a_tree_that_dies_ends_the_wait_at_once(work, service):
    answer = gpuckpt("restore", work / "img", "--ready-cmd", "kill -9 $GPUCKPT_PID; exit 1", "--ready-timeout", 1000)
    assert (answer.status, answer.report["process"]) == (41, "gone"), rounds.explain(answer)
    assert "ended before it was ready" in answer.error["message"]


def test_ctrl_c_while_it_is_not_ready_leaves_it_running(work, jobs, service):
    waiting = jobs.own(
        start_gpuckpt("restore", work / "img", *NEVER, "--ready-cmd", f"touch {work}/asked", "--verbose")
    )
    pid = rounds.manifest_pids(work / "img")[0]
    harness.wait_for(lambda: harness.alive(pid) and harness.state(pid) == "S", "it is restored")
    lines = iter(waiting.stderr.readline, "")
    next(line for line in lines if '"ready"' in line)
    waiting.send_signal(signal.SIGINT)
    out, _ = waiting.communicate(timeout=60)
    assert waiting.returncode == 128 + signal.SIGINT
    assert json.loads(out)["process"] == "restored"
    assert harness.alive(pid)


def test_who_waits_hears_of_it_and_exits_with_the_jobs_status(work, jobs, service):
    """With --wait: not ready in time, then ended by a signal that gpuckpt passes on."""
    probe = ("--ready-http", f"http://{service}/", "--ready-timeout", "3")
    last = ("--post-restore", f"echo $GPUCKPT_OUTCOME >{work}/said; exit 5")
    with (work / "err").open("w") as err:
        waiting = jobs.start(*starting.GPUCKPT, "restore", work / "img", "--wait", *probe, *last, stderr=err)
    harness.wait_for(lambda: "post-restore: exited with 5" in (work / "err").read_text(), "both are said at once")
    assert "was not ready within 3 s" in (work / "err").read_text()
    assert (work / "said").read_text() == "failed\n"
    assert waiting.poll() is None
    waiting.terminate()
    assert waiting.wait(60) == 128 + signal.SIGTERM


def test_the_terminal_goes_through_while_it_is_not_ready(work, jobs):
    job = starting.start(jobs, "ssh -t", "pty", work / "log")
    rounds.dump(jobs, job.pid, work / "img")
    job.close()
    at_dump = harness.numbers(work / "log")[-1]
    last = f"echo $GPUCKPT_OUTCOME >{work}/said"
    argv = ("restore", work / "img", "--wait", *NEVER, "--post-restore", last)
    terminal = starting.Terminal(jobs, *starting.GPUCKPT, *argv)
    rounds.goes_on(work / "log", at_dump)
    terminal.type("a line\n")
    terminal.see("heard a line")
    terminal.process.send_signal(signal.SIGUSR2)
    assert terminal.status() == 3
    assert (work / "said").read_text() == "failed\n", "what --pre-restore did is undone when the job ends unready, too"
    terminal.close()

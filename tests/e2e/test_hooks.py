"""The user's own commands around a dump and a restore: what they are told, what they can change, what they cannot harm."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys

import pytest

from tests import harness
from tests.e2e import rounds
from tests.harness import criu_or_reason, gpuckpt, start_gpuckpt

pytestmark = pytest.mark.criu

SAY = "echo $GPUCKPT_PHASE $GPUCKPT_PID ${GPUCKPT_OUTCOME:--} ${GPUCKPT_PROCESS:--} ${GPUCKPT_IMAGE_ID:--} $GPUCKPT_IMAGE $GPUCKPT_HOST"


def said(work) -> list[list[str]]:
    """What the commands wrote of their variables: phase, pid, outcome, process, id, image, host."""
    path = work / "said"
    return [line.split() for line in path.read_text().splitlines()] if path.exists() else []


@pytest.fixture
def say(work):
    """A command that writes down what it is told."""
    return f"{SAY} >>{work}/said"


@pytest.fixture
def job(work, jobs):
    """A program that counts."""
    child = jobs.python("counter.py", work / "log")
    harness.wait_for_count(work / "log", 2)
    return child


def test_they_are_told_what_came_of_it(work, jobs, job, say):
    dumped = rounds.dump(jobs, job.pid, work / "img", "--pre-dump", f"echo hello; {say}", "--post-dump", say)
    pid, image, host = str(job.pid), str(work / "img"), os.uname().nodename
    number = dumped.report["data"]["image_id"]
    at_dump = harness.numbers(work / "log")[-1]
    restored = rounds.restore(jobs, work / "img", "--pre-restore", say, "--post-restore", say)
    assert said(work) == [
        ["pre-dump", pid, "-", "-", "-", image, host],
        ["post-dump", pid, "ok", "ended", number, image, host],
        ["pre-restore", pid, "-", "-", number, image, host],
        ["post-restore", pid, "ok", "restored", number, image, host],
    ]
    assert '"pre_dump", "state": "output", "message": "hello"' in dumped.stderr
    assert dumped.report["data"]["seconds"].keys() >= {"pre_dump", "post_dump", "capture"}
    assert restored.report["data"]["seconds"].keys() >= {"pre_restore", "post_restore", "criu"}
    rounds.goes_on(work / "log", at_dump)


def test_a_signal_in_the_last_one_does_not_hide_why_the_first_one_refused(work, job):
    run = start_gpuckpt(
        *("dump", "--tree", job.pid, work / "img", "--pre-dump", "echo drained; exit 1"),
        *("--post-dump", f"touch {work}/undoing; sleep 60"),
    )
    harness.wait_for((work / "undoing").exists, "what was begun is being undone")
    run.send_signal(signal.SIGTERM)
    out, _ = run.communicate(timeout=60)
    error = json.loads(out)["error"]
    assert run.returncode == 20
    assert "--pre-dump exited with 1" in error["message"]
    assert "SIGTERM" in error["hint"]


def test_a_plan_names_them_and_runs_none(work, job, say):
    plan = gpuckpt("dump", "--tree", job.pid, work / "img", "--dry-run", "--pre-dump", say, "--post-dump", "true")
    assert (plan.status, plan.report["outcome"]) == (0, "planned")
    assert plan.report["data"]["hooks"] == {"pre-dump": say, "post-dump": "true"}
    assert said(work) == []


@pytest.mark.parametrize(
    ("command", "why"),
    [
        ("echo no luck >&2; exit 4", "exited with 4: no luck"),
        ("trap '' TERM; sleep 1000 & wait; sleep 1000", "did not end in time"),
        ("/nothing/here", "exited with 127"),
    ],
)
def test_one_that_fails_stops_the_dump_with_nothing_touched(work, job, say, command, why):
    answer = gpuckpt(
        *("dump", "--tree", job.pid, work / "img", "--hook-timeout", 1, "--pre-dump", command, "--post-dump", say)
    )
    assert (answer.status, answer.report["process"], answer.error["code"]) == (20, "untouched", "refused")
    assert why in answer.error["message"]
    assert answer.finding_ids == {"pre-dump"}
    assert [words[:4] for words in said(work)] == [["post-dump", str(job.pid), "refused", "untouched"]]
    assert not list(work.glob("img*"))
    rounds.goes_on(work / "log", harness.numbers(work / "log")[-1])


def test_it_can_change_what_would_refuse_and_is_judged_by_what_it_did(work, jobs, say):
    with socket.create_server(("127.0.0.1", 0)) as peer:
        (work / "peer").write_text(str(peer.getsockname()[1]))
        job = jobs.python("web.py", work)
        harness.wait_for((work / "port").exists, "it listens")
        with peer.accept()[0]:
            target = ("dump", "--tree", job.pid, work / "img")
            assert rounds.refused(gpuckpt(*target)) == {"tcp-outside"}
            plan = gpuckpt(*target, "--dry-run", "--pre-dump", "true")
            assert (plan.status, plan.report["outcome"]) == (0, "planned")
            found = {one["id"]: one for one in plan.report["findings"]}["tcp-outside"]
            assert (found["verdict"], found["severity"]) == ("fail", "warn")
            answer = gpuckpt(*target, "--pre-dump", "true", "--post-dump", say)
            assert rounds.refused(answer) == {"tcp-outside"}
            assert [words[0:3:2] for words in said(work)] == [["post-dump", "refused"]]
            let_go = f"kill -USR1 $GPUCKPT_PID; until [ -e {work}/closed ]; do sleep 0.1; done"
            rounds.dump(jobs, job.pid, work / "img", "--pre-dump", let_go)


def test_one_that_ends_the_job_leaves_nothing_to_save(work, jobs, job, say):
    with rounds.reaping(jobs):
        answer = gpuckpt(
            *(
                "dump",
                "--tree",
                job.pid,
                work / "img",
                "--pre-dump",
                "kill -9 $GPUCKPT_PID; sleep 1",
                "--post-dump",
                say,
            )
        )
    assert answer.status == 21
    assert [words[0:3:2] for words in said(work)] == [["post-dump", "failed"]]
    assert not list(work.glob("img*"))


def test_ctrl_c_ends_it_and_the_last_one_still_runs(work, job, say):
    """The signal comes from the command itself: gpuckpt is its parent."""
    command = f"trap 'echo ended >>{work}/ended; exit' TERM; kill -INT $PPID; sleep 1000 & wait"
    answer = gpuckpt("dump", "--tree", job.pid, work / "img", "--pre-dump", command, "--post-dump", say)
    assert answer.status == 128 + signal.SIGINT
    assert (work / "ended").read_text() == "ended\n"
    assert [words[0:3:2] for words in said(work)] == [["post-dump", "failed"]]
    rounds.goes_on(work / "log", harness.numbers(work / "log")[-1])


def test_kill_9_leaves_the_job_as_it_was_and_the_next_run_says_what_is_owed(work, jobs, job, say):
    command = f"kill -9 $PPID; touch {work}/went-on"
    killed = jobs.own(start_gpuckpt("dump", "--tree", job.pid, work / "img", "--pre-dump", command, "--post-dump", say))
    killed.communicate(timeout=60)
    assert killed.returncode == -signal.SIGKILL
    harness.wait_for((work / "went-on").exists, "the command goes on")
    rounds.goes_on(work / "log", harness.numbers(work / "log")[-1])
    assert said(work) == []
    notes = rounds.dump(jobs, job.pid, work / "img").report["data"]["notes"]
    assert any(f"gpuckpt dump of {job.pid} was killed before its --post-dump ran: see" in note for note in notes)
    assert "was killed before" not in str(gpuckpt("restore", "--tree", os.getpid()).report)


def test_a_dump_that_fails_afterwards_is_told_to_the_last_one_which_changes_nothing(work, job, say):
    real, _ = criu_or_reason()
    broken = work / "criu"
    broken.write_text(f'#!/bin/sh\nfor word; do [ "$word" = dump ] && exit 1; done\nexec {real} "$@"\n')
    broken.chmod(0o755)
    answer = gpuckpt(
        *("dump", "--tree", job.pid, work / "img", "--pre-dump", "true", "--post-dump", f"{say}; exit 9"),
        env={"GPUCKPT_CRIU": str(broken)},
    )
    assert (answer.status, answer.report["process"]) == (30, "running"), rounds.explain(answer)
    assert "--post-dump exited with 9" in answer.error["hint"]
    assert [words[:4] for words in said(work)] == [["post-dump", str(job.pid), "failed", "running"]]


def test_a_last_one_that_fails_costs_no_image_and_is_said(work, jobs, job):
    jobs.adopt(job.pid)
    argv = ("dump", "--tree", str(job.pid), str(work / "img"), "--settle", "0", "--post-dump", "echo full; exit 7")
    with rounds.reaping(jobs):
        done = subprocess.run([sys.executable, "-m", "gpuckpt", *argv], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr.startswith("gpuckpt: warning: post-dump: exited with 7: full")
    assert (work / "img" / "manifest.json").exists()


def test_a_restore_gets_its_file_back_first_and_a_failing_last_one_is_said(work, jobs, job, say):
    rounds.dump(jobs, job.pid, work / "img")
    (work / "log").rename(work / "aside")
    assert rounds.refused(gpuckpt("restore", work / "img")) == {"files-missing"}
    options = ("--pre-restore", f"mv {work}/aside {work}/log", "--post-restore", f"{say}; exit 3")
    jobs.adopt(*rounds.manifest_pids(work / "img"))
    answer = gpuckpt("restore", work / "img", *options, *rounds.SETTLE)
    assert (answer.status, answer.report["process"]) == (41, "restored"), rounds.explain(answer)
    assert answer.error["message"] == "--post-restore exited with 3"
    assert answer.finding_ids >= {"post-restore"}
    rounds.goes_on(work / "log", harness.numbers(work / "log")[-1])


def test_a_last_one_that_ends_the_job_is_no_success(work, jobs, job):
    rounds.dump(jobs, job.pid, work / "img")
    jobs.adopt(*rounds.manifest_pids(work / "img"))
    answer = gpuckpt("restore", work / "img", *rounds.SETTLE, "--post-restore", "kill -9 $GPUCKPT_PID; sleep 1")
    assert (answer.status, answer.report["process"]) == (41, "gone"), rounds.explain(answer)

"""The contract of exit statuses, one real run for each: what it says, and what became of the job."""

from __future__ import annotations

import fcntl
import json
import os
import platform
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest

import gpuckpt as package
from tests import harness
from tests.faults import arena
from tests.faults.arena import SETTLE, Shot
from tests.harness import gpuckpt

pytestmark = pytest.mark.criu

# Ends by itself when it has stood still for a while, as a job does whose lease has run out. By the wall clock: CRIU
# gives a restored tree a time namespace in which the monotonic clock has not moved.
IMPATIENT = """
import os, sys, time
log = os.open(sys.argv[1], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
number, before = 0, time.time()
while time.time() - before < 2:
    before, number = time.time(), number + 1
    os.write(log, b"%d\\n" % number)
    time.sleep(0.02)
sys.exit(3)
"""


def test_0_done(job, place):
    answer = gpuckpt("dump", "--tree", job.root, place / "img", *SETTLE)
    assert (answer.status, answer.report["process"]) == (0, "ended"), answer.error
    answer = gpuckpt("restore", place / "img", *SETTLE)
    assert (answer.status, answer.report["process"]) == (0, "restored"), answer.error
    job.assert_goes_on()


def test_1_a_bug(job, place):
    """An installation that lacks a module: a traceback, an envelope all the same, and no claim about the job."""
    shutil.copytree(Path(package.__file__).parent, place / "broken" / "gpuckpt")
    (place / "broken" / "gpuckpt" / "flows" / "dump.py").unlink()
    answer = gpuckpt("dump", "--tree", job.root, place / "img", cwd=place / "broken")
    assert (answer.status, answer.report["process"]) == (1, None)
    assert answer.error["code"] == "internal"
    assert "Traceback" in answer.stderr
    job.assert_goes_on()


def test_2_wrong_usage(job, place):
    answer = gpuckpt("dump", "--tree", job.root, place / "img", "--no-such-option")
    assert (answer.status, answer.error["code"]) == (2, "usage")
    assert "--no-such-option" in answer.error["message"]
    job.assert_goes_on()


def test_10_this_machine_lacks_something(job, place):
    answer = gpuckpt("dump", "--tree", job.root, place / "img", env={"GPUCKPT_CRIU": "/nowhere/criu"})
    assert (answer.status, answer.report["process"]) == (10, "untouched")
    assert "/nowhere/criu" in answer.error["message"]
    job.assert_goes_on()


def test_20_a_check_refuses(job, place):
    (place / "img").mkdir()
    answer = gpuckpt("dump", "--tree", job.root, place / "img")
    assert (answer.status, answer.report["process"]) == (20, "untouched")
    assert str(place / "img") in answer.error["message"]
    job.assert_goes_on()


def test_21_no_such_image(place):
    answer = gpuckpt("restore", place / "img")
    assert (answer.status, answer.report["process"]) == (21, "untouched")


def test_22_another_gpuckpt_is_at_work(job, place):
    (place / "img.partial").mkdir()
    holder = os.open(place / "img.partial", os.O_RDONLY)
    fcntl.flock(holder, fcntl.LOCK_EX)
    answer = gpuckpt("dump", "--tree", job.root, place / "img")
    os.close(holder)
    assert (answer.status, answer.report["process"]) == (22, "untouched")
    job.assert_goes_on()


def test_30_the_dump_fails_and_the_job_goes_on(job, place):
    answer = gpuckpt(
        "dump", "--tree", job.root, place / "img", "--timeout", 0.5, env=harness.slow_criu(place, "dump", 3)
    )
    assert (answer.status, answer.report["process"]) == (30, "running"), answer.error
    job.assert_goes_on()


def test_31_the_job_does_not_run(job, place):
    """A CRIU that dies and takes a process along: which process is what, and what to do."""
    criu, _ = harness.criu_or_reason()
    deadly = place / "criu"
    deadly.write_text(f'#!/bin/sh\n[ "$1" = dump ] && {{ kill -9 {job.pids[1]}; kill -9 $$; }}\nexec {criu} "$@"\n')
    deadly.chmod(0o755)
    answer = gpuckpt("dump", "--tree", job.root, place / "img", *SETTLE, env={"GPUCKPT_CRIU": str(deadly)})
    assert (answer.status, answer.report["process"]) == (31, "gone"), answer.error
    assert f"{job.pids[1]} gone" in answer.error["message"]
    assert answer.error["hint"]
    assert not (place / "img").exists()


def test_40_a_restore_fails_and_leaves_nothing(job, place):
    arena.dump_and_wait(job, place / "img")
    answer = gpuckpt("restore", place / "img", "--timeout", 0.5, env=harness.slow_criu(place, "restore", 3))
    assert (answer.status, answer.report["process"]) == (40, "untouched"), answer.error
    assert not job.alive
    arena.restore_and_wait(job, place / "img")
    job.assert_goes_on()


def test_41_restored_and_not_healthy(jobs, place):
    child = jobs.start(sys.executable, "-c", IMPATIENT, place / "log")
    harness.wait_for_count(place / "log", 2)
    assert gpuckpt("dump", "--tree", child.pid, place / "img").status == 0
    child.wait(10)
    last = harness.numbers(place / "log")[-1]
    time.sleep(2)
    answer = gpuckpt("restore", place / "img", "--settle", 10)
    assert (answer.status, answer.report["process"]) == (41, "gone"), answer.error
    assert f"process {child.pid} ended" in answer.error["message"]
    # Where it is reaped before we look, the kernel tells since 6.15.
    if tuple(map(int, platform.release().split(".")[:2])) >= (6, 15):
        assert answer.error["message"].endswith(", exit status 3")
    assert harness.numbers(place / "log")[-1] <= last + 1


def test_60_an_image_that_is_damaged_and_61_one_of_a_newer_format(job, place):
    arena.dump_and_wait(job, place / "img")
    manifest = place / "img" / "manifest.json"
    body = json.loads(manifest.read_text())
    manifest.write_text(json.dumps(body | {"format": 1000}))
    answer = gpuckpt("restore", place / "img")
    assert (answer.status, answer.report["process"]) == (61, "untouched"), answer.error
    manifest.write_text(json.dumps(body | {"image_id": "other"}))
    answer = gpuckpt("restore", place / "img")
    assert (answer.status, answer.report["process"]) == (60, "untouched"), answer.error
    assert "manifest.json" in answer.error["message"]
    assert not job.alive


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_128_and_the_signal(job, place, number):
    shot = Shot("dump", "--tree", job.root, place / "img", *SETTLE)
    assert shot.until(lambda: arena.journal_has(shot.main.pid, "criu-started"))
    shot.main.send_signal(number)
    answer = shot.answer()
    assert answer.status == 128 + number, answer.error
    assert answer.report["process"] == "running"
    job.assert_goes_on()

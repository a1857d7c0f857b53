"""A saved program is sent away by pushes that are killed again and again, and goes on from the copy."""

from __future__ import annotations

import random
import shutil
import time

import pytest

from tests import harness
from tests.e2e import rounds
from tests.harness import gpuckpt, start_gpuckpt
from tests.sshd import REMOTE_COMMAND
from tests.transferring import push

pytestmark = pytest.mark.criu

KILLS = 4


def test_a_program_goes_on_from_a_copy_whose_push_was_killed_at_random(work, jobs, sshd):
    there = work / "there"
    there.mkdir(mode=0o700)
    job = jobs.python("counter.py", work / "log", 20)
    harness.wait_for_count(work / "log", 3)
    rounds.dump(jobs, job.pid, work / "image")
    at_dump = harness.numbers(work / "log")[-1]
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    chance = random.Random(seed)
    for _ in range(KILLS):
        running = jobs.own(
            start_gpuckpt(
                *("push", work / "image", f"far:{there}", "--ssh-config", sshd.config, "--bwlimit", "2M"),
                *("--remote-command", REMOTE_COMMAND),
            )
        )
        time.sleep(chance.uniform(0.2, 2.0))
        running.kill()
        running.communicate()
    harness.wait_for(lambda: push(sshd, work / "image", there).status != 22, "the last far side has gone")
    assert gpuckpt("inspect", there / "image", "--verify").report["data"]["verified"] is True
    shutil.rmtree(work / "image")
    rounds.restore(jobs, there / "image")
    harness.wait_for_count(work / "log", at_dump + 5)
    harness.assert_gapless(work / "log")

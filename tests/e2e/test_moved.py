"""A saved program is sent away by a push that is killed twenty times, and goes on from the copy on the other host."""

from __future__ import annotations

import json
import random
import signal
import time

import pytest

from tests.e2e.rounds import SETTLE, explain, goes_on
from tests.harness import numbers, wait_for, wait_for_count

pytestmark = pytest.mark.criu

SEED = 5
KILLS = 20


def until(running, phase: str) -> None:
    """Read what a push tells until it comes to a phase, or ends."""
    for line in running.stderr:
        if json.loads(line)["event"] == phase:
            return


def kill_one(two_hosts, jobs, chance: random.Random, stage: str) -> None:
    """Begin the push and kill it (-9) in a stage of it; `begin`: while it starts and connects."""
    slow = ("--bwlimit", "1M") if stage in ("begin", "transfer") else ()
    running = jobs.own(two_hosts.a.start_gpuckpt("push", "/srv/image", "b:/srv", *two_hosts.reach, *slow))
    if stage != "begin":
        until(running, stage)
    time.sleep(chance.uniform(0, 1.0 if stage in ("begin", "transfer") else 0.05))
    if running.poll() is None:
        two_hosts.a.signal(running, signal.SIGKILL)
    running.communicate()


def test_a_program_goes_on_from_a_copy_whose_push_was_killed_twenty_times(two_hosts, jobs):
    a, b = two_hosts.a, two_hosts.b
    pid = a.python("counter.py", "/srv/log", 48)
    wait_for_count(a.outside("/srv/log"), 3)
    dumped = a.gpuckpt("dump", "--tree", pid, "/srv/image", *SETTLE)
    assert dumped.status == 0, explain(dumped)
    chance = random.Random(SEED)
    # Nearly all while pieces are carried, in any order; those that may complete it come last.
    early = [chance.choice(["begin", "transfer", "transfer", "transfer"]) for _ in range(KILLS - 4)]
    in_the_middle = 0
    for stage in [*early, "verify", "verify", "publish", "publish"]:
        kill_one(two_hosts, jobs, chance, stage)
        in_the_middle += b.outside("/srv/image.partial/journal").exists()
        assert not b.outside("/srv/image").exists() or stage in ("verify", "publish")

    assert in_the_middle > KILLS / 2

    def push() -> bool:
        return a.gpuckpt("push", "/srv/image", "b:/srv", *two_hosts.reach).status != 22

    wait_for(push, "the last far side has gone")
    assert b.gpuckpt("inspect", "/srv/image", "--verify").report["data"]["verified"] is True
    a.run("rm", "-r", "/srv/image")
    b.outside("/srv/log").write_bytes(a.outside("/srv/log").read_bytes())
    restored = b.gpuckpt("restore", "/srv/image", *SETTLE)
    assert restored.status == 0, explain(restored)
    b.run("kill", "-USR1", pid)
    goes_on(b.outside("/srv/log"), numbers(a.outside("/srv/log"))[-1])
    wait_for(lambda: "XSUM" in b.outside("/srv/log").read_text(), "it has looked at its memory")

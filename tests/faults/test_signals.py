"""INT, TERM and HUP at several phases: the tree runs on (looked at), nothing stays behind, the exit status is 128+n."""

from __future__ import annotations

import os
import signal
import time

import pytest

from tests import harness
from tests.faults import arena
from tests.faults.arena import SETTLE, Shot
from tests.harness import gpuckpt

pytestmark = pytest.mark.criu

CASES = [
    (signal.SIGINT, 1, "partial"),
    (signal.SIGTERM, 1, "owner-started"),
    (signal.SIGINT, 2, "criu-started"),
    (signal.SIGHUP, 1, "criu-started"),
    (signal.SIGTERM, 2, "capturing"),
    (signal.SIGINT, 1, "at-gate"),
    (signal.SIGHUP, 3, "at-gate"),
]

BEFORE_CRIU_WORKS = ("partial", "owner-started", "criu-started")
"""It is made to wait there: on a fast machine all is over before the signal comes."""


def _press(shot: Shot, number: int, times: int) -> None:
    """As the terminal does: to the whole process group, again and again."""
    for _ in range(times):
        os.killpg(shot.main.pid, number)
        shot.until_seconds(0.05, since=time.monotonic())
        if not shot.running:
            return


@pytest.mark.parametrize("leave_running", [False, True], ids=["ending", "leave-running"])
@pytest.mark.parametrize(("number", "times", "phase"), CASES)
def test_a_dump_is_broken_off(job, place, number, times, phase, leave_running):
    image = place / "img"
    more = ["--leave-running"] if leave_running else []
    env = harness.slow_criu(place, "dump", 0.7) if phase in BEFORE_CRIU_WORKS else None
    shot = Shot("dump", "--tree", job.root, image, *SETTLE, *more, start_new_session=True, env=env)
    partial = place / "img.partial"
    moments = {"partial": partial.exists, "capturing": lambda: any((partial / "criu").glob("core-*"))}
    assert shot.until(moments.get(phase, lambda: arena.journal_has(shot.main.pid, phase)))
    _press(shot, number, times)
    answer = shot.answer()
    if answer is not None and answer.status == 0:  # it came when the dump could not be broken off any more
        assert phase not in BEFORE_CRIU_WORKS
        assert image.exists()
        arena.remove_images(place)
        return
    assert shot.main.returncode == 128 + number
    if answer is not None:  # another press may come while the words are written
        assert answer.report["process"] == "running"
        assert signal.Signals(number).name in answer.error["message"]
    job.assert_goes_on()
    assert not image.exists()
    assert not partial.exists()
    assert not arena.runs_of(*job.pids)


@pytest.mark.parametrize(
    ("number", "times", "phase"),
    [
        (signal.SIGINT, 1, "owner-started"),
        (signal.SIGINT, 2, "criu-started"),
        (signal.SIGTERM, 1, "criu-started"),
        (signal.SIGHUP, 1, "let-go"),
    ],
)
def test_a_restore_is_broken_off(job, place, number, times, phase):
    """Nothing of the tree is left, or it runs and the answer says so."""
    image = place / "img"
    arena.dump_and_wait(job, image)
    before = job.log.read_text()
    env = harness.slow_criu(place, "restore", 0.7) if phase in BEFORE_CRIU_WORKS else None
    shot = Shot("restore", image, *SETTLE, start_new_session=True, env=env)
    assert shot.until(lambda: arena.journal_has(shot.main.pid, phase))
    _press(shot, number, times)
    answer = shot.answer()
    assert answer.status in ((0, 128 + number) if phase == "let-go" else (128 + number,)), answer.error
    if answer.report["process"] == "restored":
        job.assert_goes_on()
        job.kill()
        os.truncate(job.log, len(before))
    else:
        assert answer.report["process"] == "untouched"
        assert not job.alive
        assert job.log.read_text() == before
    assert not arena.runs_of(*job.pids)
    assert gpuckpt("restore", image, *SETTLE).status == 0
    job.assert_goes_on()


def test_a_restore_is_broken_off_while_it_prepares(place):
    """The owner is there and has no order yet: nobody waits for it, and it ends."""
    large = arena.Job.start(place, 200)
    arena.dump_and_wait(large, place / "img")
    shot = Shot("restore", place / "img", "--plain", *SETTLE)
    assert shot.until(lambda: arena.owner_of(shot.main.pid))
    shot.main.send_signal(signal.SIGINT)
    answer = shot.answer()
    assert (answer.status, answer.report["process"]) == (128 + signal.SIGINT, "untouched"), answer.error
    arena.wait_quiet(large)
    assert not large.alive
    assert not arena.runs_of(*large.pids)
    large.end()


def test_the_deadline_passes(job, place):
    """--timeout ends in the unwind too: 30, the tree runs on."""
    slow = harness.slow_criu(place, "dump", 3)
    answer = gpuckpt("dump", "--tree", job.root, place / "img", *SETTLE, "--timeout", 0.5, env=slow)
    assert (answer.status, answer.report["process"]) == (30, "running"), answer.error
    assert "--timeout" in answer.error["message"]
    job.assert_goes_on()
    assert sorted(path.name for path in place.iterdir()) == ["log", "slow-criu"]
    assert not arena.runs_of(*job.pids)


@pytest.mark.parametrize("verb", ["dump", "restore"])
def test_a_signal_that_also_ends_what_is_asked_is_no_refusal(job, place, verb):
    """A program that has just been forked is still in our process group: Ctrl-C ends it before it could answer."""
    image = place / "img"
    tree = ("--tree", job.root) if verb == "dump" else ()
    if verb == "restore":
        assert gpuckpt("dump", "--tree", job.root, image, *SETTLE, "--leave-running").status == 0
    hit = place / "hit-criu"
    hit.write_text("#!/bin/sh\nkill -TERM $PPID\nkill -TERM $$\n")
    hit.chmod(0o755)
    answer = gpuckpt(verb, *tree, image, *SETTLE, env={"GPUCKPT_CRIU": str(hit)})
    assert (answer.status, answer.report["process"]) == (128 + signal.SIGTERM, "untouched"), answer.error
    assert "SIGTERM" in answer.error["message"]
    assert "install" not in answer.error["hint"]
    job.assert_goes_on()


def test_a_criu_that_is_killed_while_it_is_asked_is_told_so(job, place):
    hit = place / "hit-criu"
    hit.write_text("#!/bin/sh\nkill -KILL $$\n")
    hit.chmod(0o755)
    answer = gpuckpt("dump", "--tree", job.root, place / "img", env={"GPUCKPT_CRIU": str(hit)})
    assert answer.status == 10
    assert "was ended by SIGKILL" in answer.error["message"]
    job.assert_goes_on()

"""A tree that came alive keeps the files that its restore put back, whoever is killed after that."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from pathlib import Path

import pytest

from tests import harness
from tests.faults import arena
from tests.faults.arena import SETTLE, Shot
from tests.harness import wait_for

pytestmark = [pytest.mark.criu, pytest.mark.timeout(300)]

DIES = "kill -9 $PPID"
FINISHES_AND_DIES = (
    "touch {go}; while [ -e /proc/{root} ] && ! grep -q '^State:.Z' /proc/{root}/status; do sleep 0.05; done"
)


class Finisher:
    """result_writer.py in an image, its child stopped by its user, and its file gone."""

    def __init__(self, jobs, place: Path) -> None:
        self.place, self.file, self.go, self.image = place, place / "result", place / "go", place / "img"
        job = jobs.start(sys.executable, "-E", "-S", harness.PROGRAMS / "result_writer.py", self.file, self.go)
        self.root = job.pid
        (self.child,) = wait_for(lambda: arena.children(job.pid), "it has a child")
        jobs.adopt(self.child)
        os.kill(self.child, signal.SIGSTOP)
        wait_for(lambda: harness.state(self.child) == "T", "it stops")
        done = harness.gpuckpt("dump", "--tree", job.pid, self.image, "--capture-files", "writable", *SETTLE)
        assert done.status == 0, done.error
        job.wait(10)
        wait_for(lambda: not harness.state(self.child) or self.reap(), "its child is gone")
        self.file.unlink()

    def restore(self, then: str) -> Shot:
        """The owner runs a CRIU after whose successful restore something happens before the owner hears of it."""
        criu, _ = harness.criu_or_reason()
        program = self.place / "criu"
        program.write_text(f'#!/bin/sh\n[ "$1" = restore ] || exec {criu} "$@"\n{criu} "$@" || exit\n{then}\n')
        program.chmod(0o755)
        return Shot("restore", self.image, *SETTLE, env={"GPUCKPT_CRIU": str(program)})

    def reap(self) -> bool:
        """What was restored is our child."""
        for pid in (self.root, self.child):
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        return not harness.state(self.root) and not harness.state(self.child)

    def finish(self) -> None:
        """It writes its result, where its user finds it."""
        self.go.touch()
        wait_for(self.reap, "it ends")
        assert self.file.read_text() == "begun\nresult\n"
        assert harness.gpuckpt("restore", "--tree", self.root).status == 21
        assert self.file.read_text() == "begun\nresult\n"
        assert not arena.runs_of(self.root)


@pytest.fixture
def finisher(jobs, place):
    made = Finisher(jobs, place)
    yield made
    jobs.end()
    wait_for(made.reap, "nothing is left")


def test_the_owner_is_killed(finisher):
    """A process that its user had stopped is no sign of a tree that is held."""
    answer = finisher.restore(DIES).answer()
    assert (answer.status, answer.report["process"]) == (0, "restored"), answer.error
    assert harness.state(finisher.child) == "T"
    assert harness.alive(finisher.root)
    finisher.finish()


def test_the_second_owner_is_killed_too(finisher):
    shot = finisher.restore(DIES)
    shot.until(lambda: arena.owner_of(shot.main.pid))
    first = arena.owner_of(shot.main.pid)
    assert shot.until(lambda: arena.owner_of(shot.main.pid) not in (None, first))
    assert arena.kill(arena.owner_of(shot.main.pid))
    answer = shot.answer()
    assert (answer.status, answer.report["process"]) == (40, "frozen"), answer.error
    assert f"restore --tree {finisher.root}" in answer.error["hint"]
    assert f"{finisher.file} was missing and is put back from the image" in answer.error["hint"]
    finisher.finish()


def test_it_has_finished_when_somebody_looks(finisher):
    then = FINISHES_AND_DIES.format(go=finisher.go, root=finisher.root)
    answer = finisher.restore(f"{then}\n{DIES}").answer()
    assert (answer.status, answer.report["process"]) == (41, "gone"), answer.error
    assert "has ended since" in answer.error["message"]
    finisher.finish()

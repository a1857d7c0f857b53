"""CRIU's link-remap files: none of another job's is ever taken, and none is left behind."""

from __future__ import annotations

import json
import os
import sys
import uuid
from pathlib import Path

import pytest

from tests import harness
from tests.faults.arena import RUNS, SETTLE, journal_has, runs_of
from tests.harness import gpuckpt, start_gpuckpt, wait_for

pytestmark = pytest.mark.criu
SHM = Path("/dev/shm")


class Holder:
    """One tests/programs/shm_holder.py and its names in /dev/shm."""

    def __init__(self, jobs, place: Path, value: str) -> None:
        self.name = f"gpuckpt-test-{uuid.uuid4().hex[:8]}"
        self.log = place / f"{value}.log"
        self.child = jobs.start(
            sys.executable, "-E", "-S", harness.PROGRAMS / "shm_holder.py", self.name, value, self.log
        )
        wait_for(lambda: self.log.exists() and self.log.stat().st_size > 20, "it maps its file")

    @property
    def pid(self) -> int:
        return self.child.pid

    @property
    def names(self) -> list[str]:
        return [name for name in os.listdir(SHM) if name.startswith(self.name)]

    @property
    def litter(self) -> list[str]:
        """Further names of its file: CRIU's. Other tests may have theirs there."""
        inode = (SHM / f"{self.name}.pub").stat().st_ino
        return [entry.name for entry in os.scandir(SHM) if entry.inode() == inode and entry.name not in self.names]

    def forget_names(self) -> None:
        """As after a reboot, or on another host."""
        for name in self.names:
            (SHM / name).unlink()

    def last(self) -> str:
        return self.log.read_text().split()[-1]


@pytest.fixture
def holders(jobs, place):
    made: list[Holder] = []

    def make(value: str) -> Holder:
        made.append(Holder(jobs, place, value))
        return made[-1]

    yield make
    jobs.end()
    for one in made:
        one.forget_names()


def captured_path(image: Path) -> Path:
    return Path(json.loads((image / "manifest.json").read_text())["captured"][0]["path"])


def test_main_killed_after_the_commit_leaves_no_litter(holders, place):
    job = holders("AAAA")
    main = start_gpuckpt("dump", "--tree", job.pid, place / "img", *SETTLE)
    wait_for(lambda: journal_has(main.pid, "committed"), "committed")
    main.kill()
    main.communicate()
    job.child.wait(30)
    wait_for(lambda: not runs_of(job.pid), "the owner has ended", 30)
    assert not job.litter


def test_a_restore_never_takes_another_jobs_file(holders, jobs, place):
    job = holders("BBBB")
    assert gpuckpt("dump", "--tree", job.pid, place / "img").status == 0
    job.child.wait(10)
    job.forget_names()
    captured = captured_path(place / "img")
    captured.write_bytes(b"AAAA".ljust(32, b"."))
    try:
        answer = gpuckpt("restore", place / "img", *SETTLE)
        assert answer.status in (20, 40), answer.error
        assert str(captured) in answer.error["message"]
        assert captured.read_bytes()[:4] == b"AAAA"
        assert not job.names
    finally:
        captured.unlink()
    assert gpuckpt("restore", place / "img", *SETTLE).status == 0
    jobs.adopt(job.pid)
    seen = job.log.stat().st_size
    wait_for(lambda: job.log.stat().st_size > seen, "it goes on")
    assert job.last().startswith("BBBB")
    assert job.names == [f"{job.name}.pub"]


def test_a_failed_restore_takes_both_names_back(holders, place):
    job = holders("CCCC")
    criu, _ = harness.criu_or_reason()
    assert gpuckpt("dump", "--tree", job.pid, place / "img").status == 0
    job.child.wait(10)
    assert not job.litter
    job.forget_names()
    captured = captured_path(place / "img")
    broken = place / "criu"
    broken.write_text(f'#!/bin/sh\n[ "$1" = restore ] && exit 1\nexec {criu} "$@"\n')
    broken.chmod(0o755)
    answer = gpuckpt("restore", place / "img", env={"GPUCKPT_CRIU": str(broken)})
    assert answer.status == 40, answer.error
    assert not job.names
    assert not captured.exists()
    assert RUNS.parent.stat().st_mode & 0o777 == 0o700

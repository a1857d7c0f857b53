"""A restore was killed whole with its files in place, and its user has worked with them since."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from gpuckpt.owner import runs
from tests import harness
from tests.faults import arena

pytestmark = [pytest.mark.criu, pytest.mark.timeout(300)]

NO_PID = 4_194_303
"""The kernel gives this one to the very last process only: nobody has it."""

KILLED = """
import os, sys
from pathlib import Path
from gpuckpt.model.facts import ProcessId
from gpuckpt.owner import runs
from gpuckpt.system.filechanges import Attributes, FileChanges, Judged
log, part, pid = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
run = runs.begin("restore", [ProcessId(pid, 1)])
seen = log.stat()
changes = FileChanges(run.directory, run.id, lambda: None)
changes.replace(str(log), part, Attributes(0o644, 0, 0, 10**18), Judged(seen.st_dev, seen.st_ino, seen.st_size))
print(run.directory, flush=True)
os.kill(os.getpid(), 9)
"""


def killed_restore(place: Path) -> tuple[Path, Path, Path]:
    """The directory of a restore that was killed, the log that it had put in place, the one from before."""
    log, part = place / "train.log", place / "part"
    log.write_bytes(b"old\n")
    part.write_bytes(b"of the image\n")
    argv = [sys.executable, "-c", KILLED, log, part, str(NO_PID)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    assert done.returncode == -9, done.stderr
    (aside,) = place.glob("train.log.before-restore-*")
    return Path(done.stdout.strip()), log, aside


@pytest.fixture
def killed(place):
    """A killed restore; then its user goes on with the log."""
    found = killed_restore(place)
    with found[1].open("ab") as file:
        file.write(b"days of work\n")
    yield found
    runs.leftovers_of([], lambda _: None)


def assert_all_there(killed) -> None:
    _, log, aside = killed
    assert log.read_bytes() == b"of the image\ndays of work\n"
    assert aside.read_bytes() == b"old\n"


def words(killed) -> str:
    _, log, aside = killed
    return f"{log} is not as before: what was put there has been written to since, and stays; the one from before is {aside}"


def test_the_next_dump_says_so(killed, job, place):
    answer = arena.dump_and_wait(job, place / "img", "--leave-running")
    assert_all_there(killed)
    assert [one for one in answer.report["data"]["notes"] if words(killed) in one]
    assert words(killed) in answer.stderr
    assert not killed[0].exists()


def test_a_repair_says_so(killed):
    answer = harness.gpuckpt("restore", "--tree", NO_PID)
    assert answer.status == 21, answer.error
    assert_all_there(killed)
    assert words(killed) in answer.stderr


def test_what_the_owner_could_tell_nobody_is_told_by_the_next_run(killed):
    """Main was killed, and the owner is the one that takes the files back."""
    runs.remove_if_settled(killed[0])
    assert_all_there(killed)
    assert killed[0].exists()
    told: list[str] = []
    runs.leftovers_of([], told.append)
    assert [one for one in told if words(killed) in one]
    assert not killed[0].exists()

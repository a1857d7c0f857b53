"""Files that restores put in place: one restore at a time, and none goes by what it saw before it was its turn."""

from __future__ import annotations

import contextlib
import os

import pytest

from gpuckpt.owner import runs
from tests.e2e import rounds
from tests.faults import arena
from tests.faults.arena import SETTLE, Shot
from tests.faults.test_late_undo import killed_restore
from tests.harness import wait_for

pytestmark = [pytest.mark.criu, pytest.mark.timeout(300)]


def wait() -> None:
    """Whoever tests runs meanwhile has it for a moment only."""


@contextlib.contextmanager
def anothers_turn():
    """As a restore that is at work."""
    runs.make_runtime("runs")
    lock = runs.alone_with_captured_files(wait)
    try:
        yield
    finally:
        os.close(lock)


def test_what_changes_while_a_restore_waits_is_found(jobs, place):
    """Of the same size, and as it was at the dump until then: CRIU would take it, and the job find what it never wrote."""
    file, image = place / "base", place / "img"
    job = jobs.python("filewriter.py", "pages", file)
    wait_for(lambda: file.exists() and any(file.read_bytes()), "it writes")
    rounds.dump(jobs, job.pid, image, "--capture-files", "writable")
    with anothers_turn():
        shot = Shot("restore", image, *SETTLE)
        assert shot.until(lambda: arena.run_of_main(shot.main.pid)), "it has looked"
        content = bytes(len(file.read_bytes()))
        file.write_bytes(content)
    answer = shot.answer()
    assert answer.status == 40, answer.error
    assert f"{file} has changed since" in answer.error["message"]
    assert file.read_bytes() == content


def test_what_a_killed_restore_did_is_taken_back_only_when_no_other_is_at_work(place):
    directory, log, aside = killed_restore(place)
    told: list[str] = []
    with anothers_turn():
        runs.leftovers_of([], told.append)
        assert (log.read_bytes(), directory.exists()) == (b"of the image\n", True)
    runs.leftovers_of([], told.append)
    assert (log.read_bytes(), aside.exists(), directory.exists()) == (b"old\n", False, False)
    assert not told

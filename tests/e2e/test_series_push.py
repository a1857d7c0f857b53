"""A series with a copy of each image on another host, over a real sshd."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests import harness
from tests.harness import gpuckpt
from tests.sshd import REMOTE_COMMAND

pytestmark = pytest.mark.criu


@pytest.fixture
def places(work):
    """(the series here, its copy there)."""
    for name in ("here", "there"):
        (work / name).mkdir(mode=0o700)
    return work / "here", work / "there"


@pytest.fixture
def job(jobs, work):
    child = jobs.python("counter.py", work / "log", 8)
    harness.wait_for_count(work / "log", 1)
    return child


def images(place: Path) -> list[str]:
    return sorted(path.name for path in place.glob("job-*"))


def dump(sshd, job, here: Path, target: str, *options: object) -> harness.Answer:
    words = ("--leave-running", "--into", here, "--name", "job", "--settle", 0, "--push", target)
    command = [] if target.startswith("bare") else ["--remote-command", REMOTE_COMMAND]
    return gpuckpt("dump", "--tree", job.pid, *words, "--ssh-config", sshd.config, *command, *options)


def test_each_image_is_copied_and_the_copies_go_by_the_same_rules(sshd, job, places):
    here, there = places
    answers = [dump(sshd, job, here, f"far:{there}", "--keep", 2) for _ in range(3)]
    assert [answer.status for answer in answers] == [0, 0, 0], [answer.error for answer in answers]
    assert images(here) == images(there)
    assert len(images(there)) == 2
    assert os.readlink(there / "latest") == images(there)[-1]
    pushed = answers[2].report["data"]["series"]["pushed"]
    assert pushed["location"] == f"far:{there}/{images(here)[-1]}"
    assert len(pushed["removed"]) == 1
    assert pushed["bytes_sent"] < pushed["bytes_skipped"], "what did not change is linked there"
    assert gpuckpt("inspect", there, "--verify").report["data"]["series"][0]["images"][0]["verified"] is True
    seen = gpuckpt("inspect", here).report["data"]["series"][0]["images"]
    assert [copy["host"] for one in seen for copy in one["protected"]] == ["far", "far"]


def test_a_host_with_sftp_alone_keeps_all_copies(sshd, job, places):
    here, there = places
    answers = [dump(sshd, job, here, f"bare:{there}", "--keep", 1) for _ in range(2)]
    assert [answer.status for answer in answers] == [0, 0], [answer.error for answer in answers]
    assert (len(images(here)), len(images(there))) == (1, 2)
    assert any("nothing was removed there" in note for note in answers[1].report["data"]["notes"])


def test_a_copy_that_does_not_come_about_costs_no_image(sshd, job, places, work):
    """Neither the one here nor an older one; the command that is named makes up for it."""
    here, there = places
    there.rmdir()
    there.touch()
    answer = dump(sshd, job, here, f"far:{there}")
    assert (answer.status, answer.report["outcome"], answer.report["process"]) == (50, "partial", "running")
    image = here / images(here)[0]
    assert f"{image} is complete here" in answer.error["message"]
    assert f"gpuckpt push {image} far:{there}" in answer.error["hint"]
    assert (here / "latest").resolve() == image
    assert harness.alive(job.pid)
    there.unlink()
    there.mkdir(mode=0o700)
    (there / "latest").mkdir()
    answer = dump(sshd, job, here, f"far:{there}")
    assert answer.status == 0, answer.error
    assert "series-remote" in answer.finding_ids
    assert len(images(there)) == 1

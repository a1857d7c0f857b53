"""A job that ends, grows a file or was given a FIFO: nothing of it may hang, or be called a failure."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import pytest

from gpuckpt.system import procfs
from tests import harness
from tests.faults.arena import SETTLE
from tests.harness import gpuckpt, wait_for

pytestmark = pytest.mark.criu


@pytest.fixture
def piped_image(jobs, place: Path) -> Path:
    """The image of a counter whose stdout led outside."""
    reading, writing = os.pipe()
    child = jobs.python("counter.py", place / "log", stdout=writing)
    os.close(writing)
    harness.wait_for_count(place / "log", 2)
    assert gpuckpt("dump", "--tree", child.pid, place / "img").status == 0
    child.wait(10)
    os.close(reading)
    jobs.adopt(child.pid)
    return place / "img"


def test_a_fifo_without_a_reader_does_not_hang(piped_image, place):
    os.mkfifo(place / "out")
    began = time.monotonic()
    answer = gpuckpt("restore", piped_image, "--stdout", place / "out", *SETTLE)
    assert answer.status == 40, answer.error
    assert f"nobody reads {place / 'out'}" in answer.error["message"]
    assert time.monotonic() - began < 30


def test_a_fifo_with_a_reader_is_an_ordinary_blocking_stream(piped_image, place):
    os.mkfifo(place / "out")
    reader = os.open(place / "out", os.O_RDONLY | os.O_NONBLOCK)
    try:
        answer = gpuckpt("restore", piped_image, "--stdout", place / "out", *SETTLE)
        assert answer.status == 0, answer.error
        flags = int(Path(f"/proc/{answer.report['data']['root_pid']}/fdinfo/1").read_text().split()[3], 8)
        assert not flags & os.O_NONBLOCK
    finally:
        os.close(reader)


SHORT = """
import os, sys, time
out = open(sys.argv[1], "w")
began = time.monotonic()
while not os.path.exists(sys.argv[2]):
    out.write("x"); out.flush(); time.sleep(0.01)
"""


@pytest.fixture
def writer(jobs, place):
    """Writes into a file that it has not opened for appending; ends when `place/stop` is there."""
    child = jobs.start(sys.executable, "-E", "-S", "-c", SHORT, place / "out.txt", place / "stop")
    wait_for(lambda: (place / "out.txt").exists() and (place / "out.txt").stat().st_size, "it writes")
    return child


def test_a_job_left_running_that_ends_is_no_failure(writer, place):
    dump = harness.start_gpuckpt("dump", "--tree", writer.pid, place / "img", "--leave-running", "--settle", 30)
    wait_for((place / "img").exists, "published")
    (place / "stop").touch()
    writer.wait(10)
    out, _ = dump.communicate(timeout=60)
    report = json.loads(out)
    assert (dump.returncode, report["outcome"], report["process"]) == (0, "ok", "ended"), report["error"]
    assert any("ended by itself" in note for note in report["data"]["notes"])


def test_files_that_will_grow_are_named(writer, place):
    keep = ("--leave-running", "--capture-files", "none")
    answer = gpuckpt("dump", "--tree", writer.pid, place / "img", *keep, *SETTLE)
    assert answer.status == 0, answer.error
    path = str(place / "out.txt")
    assert answer.report["data"]["restorable"] == "with-files"
    assert path in answer.report["data"]["needs_files"]
    (found,) = [one for one in answer.report["findings"] if one["id"] == "left-files"]
    assert (found["verdict"], found["severity"]) == ("fail", "warn")
    assert path in found["found"]


def test_findings_stay_with_a_failed_dump(writer, place):
    criu, _ = harness.criu_or_reason()
    broken = place / "criu"
    broken.write_text(f'#!/bin/sh\n[ "$1" = dump ] && exit 1\nexec {criu} "$@"\n')
    broken.chmod(0o755)
    answer = gpuckpt("dump", "--tree", writer.pid, place / "img", env={"GPUCKPT_CRIU": str(broken)})
    assert (answer.status, answer.report["process"]) == (30, "running"), answer.error
    assert answer.report["findings"]


def test_a_link_in_place_of_the_jobs_file(jobs, place):
    """CRIU, as root, would open what the link leads to, and hand it to the job."""
    data, secret = place / "data", place / "secret"
    for path, content in ((data, "x" * 9), (secret, "TOPSECRET")):
        path.write_text(content)
        os.utime(path, (1, 1))
    with data.open() as opened:
        child = jobs.start("/bin/sleep", "1000", stdin=opened)
    assert gpuckpt("dump", "--tree", child.pid, place / "img").status == 0
    child.wait(10)
    data.unlink()
    data.symlink_to(secret)
    answer = gpuckpt("restore", place / "img", *SETTLE)
    assert answer.status == 20, answer.error
    assert "files-owner" in answer.finding_ids
    assert str(secret) in answer.error["message"]
    assert procfs.file_here(str(data)).resolved == str(secret)
    assert procfs.file_here(str(secret)).resolved == ""

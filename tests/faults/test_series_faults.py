"""A series when things go wrong: kill -9 between any two of its steps, two at once, full and odd disks, readers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from gpuckpt.model.series import member_name
from gpuckpt.stores import directory
from gpuckpt.stores import series as stored
from tests import harness
from tests.faults import arena
from tests.faults.arena import SETTLE, Shot
from tests.harness import gpuckpt, wait_for

pytestmark = pytest.mark.criu

DYING = Path(__file__).parent / "dying.py"
FUTURE = 4_000_000_000


@pytest.fixture
def series(place):
    """The directory of a series."""
    (place / "series").mkdir(mode=0o700)
    return place / "series"


def dump(job, series, *options) -> harness.Answer:
    return gpuckpt("dump", "--tree", job.root, "--into", series, "--name", "job", *SETTLE, *options)


def images(series: Path) -> list[Path]:
    return sorted(path for path in series.glob("job-*") if path.is_dir() and not path.is_symlink())


def whole(series: Path) -> list[Path]:
    return [path for path in images(series) if not path.name.endswith(".partial")]


def dies(job, series, where: str, when: str, text: str, *options: object) -> None:
    """A dump into the series that is killed at this call; the job goes on, or is whole in an image."""
    words = ["dump", "--tree", job.root, "--into", series, "--name", "job", *SETTLE, *options]
    argv = [sys.executable, DYING, where, when, text, *words]
    done = subprocess.run([*map(str, argv)], capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL)
    assert done.returncode == -signal.SIGKILL, (done.stdout, done.stderr)
    arena.wait_quiet(job)


ON_THE_WAY = {
    "while the image is written": ("gpuckpt.stores.partialimage:PartialImage.write_manifest", "before", ""),
    "before the link": ("gpuckpt.stores.series:point_latest", "before", "job"),
    "with the new link beside the old": ("pathlib:Path.replace", "before", ".latest.new"),
    "after the link": ("gpuckpt.stores.series:point_latest", "after", "job"),
}
PRUNING = {
    "before an image goes": ("gpuckpt.stores.series:remove", "before", "job"),
    "when it is renamed": ("shutil:rmtree", "before", "series/job-"),
    "when it has gone": ("gpuckpt.stores.series:remove", "after", "job"),
}


def test_killed_at_every_step_of_a_series(job, series):
    """A dump that shall end the job: before the commit the job goes on, and `latest` leads to a whole image.

    What one leaves the next one clears, which is killed a step later; the last one lives and leaves one image.
    """
    assert dump(job, series, "--leave-running").status == 0
    for step, (where, when, text) in ON_THE_WAY.items():
        left = set(series.glob("*.partial"))
        dies(job, series, where, when, text)
        _assert_good(job, series, step, left)
    before = whole(series)
    assert len(before) == 1 + 3, "all but the first of those that were killed have published an image"
    for step, (where, when, text) in PRUNING.items():
        left = set(series.glob("*.partial"))
        dies(job, series, where, when, text, "--leave-running", "--keep", 2)
        _assert_good(job, series, step, left)
        assert (series / "latest").resolve() == whole(series)[-1], step
    answer = dump(job, series, "--leave-running", "--keep", 1)
    assert answer.status == 0, answer.error
    last = Path(answer.report["data"]["image"])
    assert {path.name for path in series.iterdir()} == {last.name, "latest", ".job.lock"}


def _assert_good(job, series: Path, step: str, left: set[Path]) -> None:
    job.assert_goes_on()
    assert (series / "latest").resolve() in whole(series), step
    image = directory.open_image(series / "latest")
    directory.verify(image)
    image.close()
    assert not left & set(series.iterdir()), step


def test_a_link_that_cannot_be_made_lets_the_job_go_on(job, series):
    """Ended, with a link to an older image, its newest work would be lost to whoever restores by the link."""
    old = Path(dump(job, series, "--leave-running").report["data"]["image"])
    (series / ".job.latest.new").mkdir()
    answer = dump(job, series)
    assert (answer.status, answer.report["process"]) == (30, "running"), answer.error
    assert ".job.latest.new" in answer.error["message"]
    job.assert_goes_on()
    assert (series / "latest").resolve() == old
    assert len(whole(series)) == 2


def test_two_at_once_and_two_jobs_at_once(job, place, series, jobs):
    """One works on a series; another job in the same directory has a series of its own."""
    other = jobs.start("/bin/sleep", "1000")
    slow = Shot("dump", "--tree", job.root, "--leave-running", "--into", series, "--name", "job", "--settle", 1000)
    assert slow.until(lambda: whole(series) and (series / "latest").is_symlink())
    for tree in (job.root, other.pid):
        busy = gpuckpt("dump", "--tree", tree, "--leave-running", "--into", series, "--name", "job", *SETTLE)
        assert (busy.status, busy.report["process"]) == (22, "untouched")
        assert f"pid {slow.main.pid}" in busy.error["message"]
    beside = gpuckpt("dump", "--tree", other.pid, "--leave-running", "--into", series, "--name", "other", *SETTLE)
    assert beside.status == 0, beside.error
    assert (series / "latest").resolve() == Path(beside.report["data"]["image"])
    arena.kill(slow.main.pid)
    arena.wait_quiet(job)
    job.assert_goes_on()


def test_the_clock_was_set_back(job, series):
    """An image of the future is there: names count on, the newest is the one that was dumped last, by every rule."""
    future = dump(job, series, "--leave-running").report["data"]["image"]
    ahead = series / member_name("job", FUTURE)
    Path(future).rename(ahead)
    taken = member_name("job", FUTURE + 1)
    (series / f"{taken}.partial").mkdir()
    (series / taken).symlink_to(ahead.name)
    answer = dump(job, series, "--leave-running", "--keep", 1, "--keep-within", "1m")
    assert answer.status == 0, answer.error
    last = series / member_name("job", FUTURE + 2)
    assert answer.report["data"]["image"] == str(last)
    assert (series / "latest").resolve() == last
    assert whole(series) == [ahead, last], "the first is younger than a minute by its own clock"
    answer = dump(job, series, "--leave-running", "--keep", 1)
    assert answer.report["data"]["series"]["removed"] == [ahead.name, last.name]


def test_no_name_is_left_after_the_last(job, series):
    (series / member_name("job", 253402300799)).touch()
    answer = dump(job, series)
    assert (answer.status, answer.report["process"]) == (20, "untouched")
    assert answer.error["hint"]
    job.assert_goes_on()


@pytest.fixture
def small_disk(place):
    """A file system of 40 MiB."""
    disk = place / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=40m,mode=700", "tmpfs", disk]).returncode:
        pytest.skip("no tmpfs can be mounted here")
    yield disk
    subprocess.run(["umount", "-l", disk], check=True)


def test_a_full_disk_costs_the_new_image_and_no_old_one(job, small_disk):
    old = Path(dump(job, small_disk, "--leave-running").report["data"]["image"])
    filler = small_disk / "filler"
    subprocess.run(["fallocate", "-l", str(_free(small_disk) - (1 << 20)), filler], check=True)
    for options in ((), ("--leave-running",)):
        answer = dump(job, small_disk, "--keep", 1, "--no-base", "--allow", "disk-space", *options)
        assert (answer.status, answer.report["process"]) == (30, "running"), answer.error
        assert "disk is full" in answer.error["message"]
    job.assert_goes_on()
    assert [path.name for path in images(small_disk)] == [old.name]
    assert (small_disk / "latest").resolve() == old
    filler.unlink()
    again = dump(job, small_disk, "--leave-running", "--keep", 1)
    assert again.report["data"]["series"]["removed"] == [old.name]


def _free(disk: Path) -> int:
    seen = os.statvfs(disk)
    return seen.f_bavail * seen.f_frsize


def test_where_no_hard_link_can_be_made_packs_are_copied(job, small_disk):
    """As on a file system without them: no image shares anything, each is a full one, and its removal frees it all."""
    old = Path(dump(job, small_disk, "--leave-running").report["data"]["image"])
    packs = [*(old / "packs").glob("*.zst")]
    if subprocess.run(["chattr", "+i", *packs], capture_output=True).returncode:
        pytest.skip("files cannot be made immutable here")
    try:
        answer = dump(job, small_disk, "--leave-running")
    finally:
        subprocess.run(["chattr", "-i", *packs], check=True)
    assert answer.status == 0, answer.error
    assert answer.report["data"]["bytes_shared"] == 0
    assert any("were copied, not linked" in note for note in answer.report["data"]["notes"])
    found = stored.look(old)
    assert found.bytes_unshared == found.bytes_on_disk > 0
    again = dump(job, small_disk, "--leave-running", "--keep", 2)
    assert again.report["data"]["series"]["removed"] == [old.name]
    job.assert_goes_on()


def test_what_is_read_or_restored_stays(job, series):
    """A reader holds the oldest; a restore holds its image while it waits for the prune to be over, and works."""
    first = Path(dump(job, series, "--leave-running").report["data"]["image"])
    reading = directory.open_image(first)
    second = dump(job, series, "--leave-running", "--keep", 1)
    assert second.report["data"]["series"]["removed"] == []
    assert any(str(first) in note for note in second.report["data"]["notes"])
    reading.close()
    third = dump(job, series, "--keep", 1)
    assert third.report["data"]["series"]["removed"] == [first.name, Path(second.report["data"]["image"]).name]
    wait_for(lambda: not job.alive, "the job has ended")
    arena.restore_and_wait(job, series / "latest")
    job.assert_goes_on()

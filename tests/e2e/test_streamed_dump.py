"""The streamed dump as a user sees it: a full disk, a damaged base, a large process, an increment."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess

import pytest

from tests import harness, packing
from tests.e2e import rounds
from tests.harness import gpuckpt

pytestmark = pytest.mark.criu

MIB = 1 << 20


def start(jobs, work, megabytes):
    job = jobs.python("changing.py", work / "log", megabytes)
    harness.wait_for_count(work / "log", 1)
    return job


def change(job, work):
    before = (work / "log").read_text().count("CHANGED")
    job.send_signal(signal.SIGUSR1)
    harness.wait_for(lambda: (work / "log").read_text().count("CHANGED") > before, "the memory changes")


def runs_on(job, log):
    at = harness.numbers(log)[-1]
    harness.wait_for_count(log, at + 2)
    assert "BROKEN" not in log.read_text()
    assert job.poll() is None


@pytest.fixture
def small_disk(work):
    """A file system of 48 MiB."""
    place = work / "disk"
    place.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=48m,mode=700", "tmpfs", place]).returncode:
        pytest.skip("no tmpfs can be mounted here")
    yield place
    subprocess.run(["umount", "-l", place], check=True)


@pytest.mark.parametrize("options", [(), ("--leave-running",), ("--level", "none", "--workers", "7"), ("--plain",)])
def test_a_disk_that_fills_up_costs_the_image_not_the_job(work, jobs, small_disk, options):
    job = start(jobs, work, 128)
    answer = gpuckpt("dump", "--tree", job.pid, small_disk / "img", *options, "--settle", 0.2, "--allow", "disk-space")
    assert (answer.status, answer.report["process"]) == (30, "running"), rounds.explain(answer)
    assert "No space left on device" in answer.error["message"] or "--plain" in options
    assert not list(small_disk.iterdir())
    runs_on(job, work / "log")


def test_an_image_in_packs_has_no_pages_files_and_one_with_plain_has(work, jobs):
    job = start(jobs, work, 32)
    for options, requires in (((), ["packs"]), (("--plain",), ["criu-files"])):
        image = work / f"img{requires[0]}"
        data = rounds.dump(jobs, job.pid, image, "--leave-running", *options).report["data"]
        manifest = rounds.manifest(image)
        assert set(manifest["requires"]) == {*requires, "open-files"}
        assert bool(list((image / "criu").glob("pages-*.img"))) == ("--plain" in options)
        sizes = {str(p.relative_to(image)): p.stat().st_size for p in image.rglob("*") if p.is_file()}
        assert {part["path"]: part["size"] for part in manifest["parts"]}.items() <= sizes.items()
        assert data["bytes_stored"] == sum(part["size"] for part in manifest["parts"])
        assert data["bytes_raw"] > 32 * MIB
        assert all(path.stat().st_mode & 0o077 == 0 for path in image.rglob("*"))
        verified = gpuckpt("inspect", image, "--verify")
        assert (verified.status, verified.report["data"]["verified"]) == (0, True)


def test_a_second_dump_writes_what_is_new(work, jobs):
    job = start(jobs, work, 256)
    rounds.dump(jobs, job.pid, work / "one", "--leave-running", "--level", "none")
    change(job, work)
    second = rounds.dump(jobs, job.pid, work / "two", "--base", work / "one", "--level", "none").report["data"]
    written = second["bytes_stored"] - second["bytes_shared"]
    assert written <= 0.15 * second["bytes_raw"], second
    on_disk = sum(
        path.stat().st_size for path in (work / "two").rglob("*") if path.is_file() and path.stat().st_nlink == 1
    )
    assert on_disk <= 0.16 * second["bytes_raw"]
    shutil.rmtree(work / "one")
    at = harness.numbers(work / "log")[-1]
    rounds.restore(jobs, work / "two")
    rounds.goes_on(work / "log", at)


def test_a_series_of_increments_restores(work, jobs):
    """Each the base of the next, through restores as well; packs that are hardly used any more go."""
    job = start(jobs, work, 64)
    rounds.dump(jobs, job.pid, work / "img0", "--leave-running")
    for number in range(1, 6):
        change(job, work)
        base = ("--base", work / f"img{number - 1}")
        rounds.dump(jobs, job.pid, work / f"img{number}", *base, *(("--leave-running",) if number < 5 else ()))
    for number in range(5):
        shutil.rmtree(work / f"img{number}")
    stored = sum(part["size"] for part in rounds.manifest(work / "img5")["parts"])
    assert stored < 2.2 * 64 * MIB
    at = harness.numbers(work / "log")[-1]
    rounds.restore(jobs, work / "img5")
    rounds.goes_on(work / "log", at)


def test_what_the_base_holds_needs_no_room(work, jobs, small_disk):
    job = start(jobs, work, 24)
    first = gpuckpt("dump", "--tree", job.pid, small_disk / "one", "--leave-running", "--settle", 0.2)
    assert first.status == 0, first.error
    taken = small_disk / "other"
    with taken.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, shutil.disk_usage(small_disk).free - 16 * MIB)
    dump = ("dump", "--tree", job.pid, small_disk / "two", "--leave-running", "--settle", 0.2)
    assert "disk-space" in rounds.refused(gpuckpt(*dump))
    second = gpuckpt(*dump, "--base", small_disk / "one")
    assert second.status == 0, second.error
    [finding] = [one for one in second.report["findings"] if one["id"] == "disk-space"]
    assert (finding["verdict"], finding["severity"]) == ("fail", "warn")
    data = second.report["data"]
    assert data["bytes_stored"] - data["bytes_shared"] < 16 * MIB


def damage(image):
    packing.flip_in_pack(packing.largest_pack(image))


def empty(image):
    (image / "manifest.json").write_bytes(b"")


def lose(image):
    next((image / "packs").glob("*.zst")).unlink()


@pytest.mark.parametrize("harm", [damage, empty, lose])
def test_a_damaged_base_is_not_used(work, jobs, harm):
    job = start(jobs, work, 32)
    rounds.dump(jobs, job.pid, work / "one", "--leave-running")
    harm(work / "one")
    data = rounds.dump(jobs, job.pid, work / "two", "--leave-running", "--base", work / "one").report["data"]
    assert any("was not used" in note for note in data["notes"]), data["notes"]
    assert data["bytes_shared"] == 0
    assert gpuckpt("inspect", work / "two", "--verify").status == 0


def test_a_base_that_is_not_there_is_refused(work, jobs):
    job = start(jobs, work, 8)
    answer = gpuckpt("dump", "--tree", job.pid, work / "img", "--base", work / "nothing")
    assert (answer.status, answer.report["process"]) == (21, "untouched")
    assert not list(work.glob("img*"))


def test_a_plain_base_shares_nothing_and_it_is_said(work, jobs):
    job = start(jobs, work, 8)
    rounds.dump(jobs, job.pid, work / "one", "--leave-running", "--plain")
    data = rounds.dump(jobs, job.pid, work / "two", "--base", work / "one").report["data"]
    assert any("--plain" in note for note in data["notes"])

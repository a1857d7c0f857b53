"""Periodic dumps as cron starts them: with its environment, without a terminal, one after the other."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import harness, packing
from tests.e2e import rounds
from tests.harness import gpuckpt

pytestmark = pytest.mark.criu

GPUCKPT = f"{sys.executable} -m gpuckpt"
ROOT = Path(__file__).parents[2]


def cron(line: str) -> subprocess.CompletedProcess:
    """As cron runs a line: nothing in the environment, no terminal. The program is installed, so to speak."""
    env = ["env", "-i", "PATH=/usr/bin:/bin", "HOME=/", f"PYTHONPATH={ROOT}"]
    return subprocess.run(
        [*env, "sh", "-c", line], capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL, cwd="/"
    )


@pytest.fixture
def place(work):
    """The directory of a series."""
    (work / "series").mkdir(mode=0o700)
    return work / "series"


@pytest.fixture
def job(jobs, work):
    """A counter that goes on, with memory that does not change, and the file with its pid."""
    child = jobs.python("counter.py", work / "log", 16)
    (work / "pid").write_text(f"{child.pid}\n")
    harness.wait_for_count(work / "log", 1)
    return child


def images(place: Path) -> list[str]:
    return sorted(path.name for path in place.iterdir() if path.is_dir() and not path.is_symlink())


def series_of(place: Path, *options: object) -> list[dict]:
    """The images as `inspect` shows them, newest first."""
    answer = gpuckpt("inspect", place, *options)
    assert (answer.status, answer.report["data"]["kind"]) == (0, "series")
    return answer.report["data"]["series"][0]["images"]


def into(place: Path, job, *options: object) -> harness.Answer:
    return gpuckpt("dump", "--tree", job.pid, "--leave-running", "--into", place, "--settle", 0, *options)


def test_twelve_runs_of_cron_leave_three_verified_images(work, place, job):
    """And print nothing; one that comes while another works says so in one line."""
    line = f"{GPUCKPT} dump --pid-file {work}/pid --leave-running --into {place} --name job --keep 3 --settle 0"
    for _ in range(12):
        done = cron(line)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    left = images(place)
    assert len(left) == 3
    assert os.readlink(place / "latest") == left[-1]
    seen = series_of(place, "--verify")
    assert [(one["name"], one["verified"]) for one in seen] == [(name, True) for name in reversed(left)]
    assert {path.name for path in place.iterdir()} == {*left, "latest", ".job.lock"}

    # It watches the job for long after its image is there.
    words = line.replace("--settle 0", "--settle 1000").split()
    slow = subprocess.Popen(words, cwd=ROOT, stderr=subprocess.DEVNULL)
    try:
        harness.wait_for(lambda: len(images(place)) == 4, "the thirteenth image")
        done = cron(line)
    finally:
        slow.kill()
        slow.wait()
    assert done.returncode == 22
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert f"has been working on the series {place}/job since" in done.stderr
    rounds.goes_on(work / "log", harness.numbers(work / "log")[-1])


def test_a_series_shares_what_did_not_change_and_is_full_now_and_then(place, job):
    first = into(place, job, "--name", "job")
    second = into(place, job, "--name", "job")
    time.sleep(1)
    third = into(place, job, "--name", "job", "--full-every", "1s")
    fourth = into(place, job, "--name", "job", "--no-base")
    about = [one.report["data"]["series"] for one in (first, second, third, fourth)]
    assert [one["base"] for one in about] == [None, Path(first.report["data"]["image"]).name, None, None]
    assert ["no whole image" in about[0]["full"], "--full-every" in about[2]["full"]] == [True, True]
    shared = [one.report["data"]["bytes_shared"] for one in (first, second, third, fourth)]
    assert [bool(size) for size in shared] == [False, True, False, False]
    manifests = [rounds.manifest(Path(one.report["data"]["image"])) for one in (first, second, third)]
    assert manifests[1]["full_created"] == manifests[0]["full_created"] == manifests[0]["created"]
    assert manifests[2]["full_created"] == manifests[2]["created"]
    seen = series_of(place)
    assert [one["copies"] for one in seen] == [3, 2, 1, 1]
    assert [one["latest"] for one in seen] == [True, False, False, False]
    assert seen[-1]["bytes_unshared"] < seen[-1]["bytes_on_disk"]
    assert seen[0]["bytes_unshared"] == seen[0]["bytes_on_disk"]


def _flip(image: Path) -> None:
    packing.flip_in_pack(packing.largest_pack(image))


def _newer(image: Path) -> None:
    raw = json.loads((image / "manifest.json").read_text())
    (image / "manifest.json").write_text(json.dumps({**raw, "format": 99}))


@pytest.mark.parametrize("damage", [_flip, _newer])
def test_a_bad_newest_image_costs_sharing_not_the_dump(place, job, damage):
    """What is wrong with it is said once, by the run that finds it; the next one has a good base again.

    It takes nobody's place: of three images with --keep 2 the damaged one is not counted.
    """
    good = Path(into(place, job, "--name", "job").report["data"]["image"])
    bad = Path(into(place, job, "--name", "job", "--no-base").report["data"]["image"])
    damage(bad)
    line = f"{GPUCKPT} dump --tree {job.pid} --leave-running --into {place} --name job --keep 2 --settle 0"
    done = cron(line)
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr.count("\n") == 1
    assert "gpuckpt: warning: series-damaged" in done.stderr
    assert str(bad) in done.stderr
    latest = (place / "latest").resolve()
    assert images(place) == [good.name, bad.name, latest.name]
    # Found in its manifest, it is passed over: the one before it is whole.
    assert (rounds.manifest(latest)["bytes_shared"] > 0) is (damage is _newer)
    assert {one["name"]: one["complete"] for one in series_of(place)}[bad.name] is (damage is _flip)
    done = cron(line)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert rounds.manifest(place / "latest")["bytes_shared"] > 0


def test_the_newest_is_restored_and_goes_on_with_its_series(work, place, job, jobs):
    """Dumped to its end, restored by the link, dumped by its old pid file: the process is younger than that now."""
    old = time.time() - 3600
    pid_file = work / "pid"
    first = gpuckpt("dump", "--pid-file", pid_file, "--into", place, "--name", "job", *rounds.SETTLE)
    assert (first.status, first.report["process"]) == (0, "ended"), rounds.explain(first)
    rounds.await_end(jobs, [job.pid])
    os.utime(pid_file, (old, old))
    series = gpuckpt("restore", place)
    assert series.status == 20
    assert f"{place}/latest" in series.error["hint"]
    rounds.restore(jobs, place / "latest", "--metrics-file", work / "restore.prom")
    assert 'gpuckpt_last_run_exit_status{command="restore",name="job"} 0' in (work / "restore.prom").read_text()
    again = gpuckpt("dump", "--pid-file", pid_file, "--leave-running", "--into", place, "--name", "job", "--settle", 0)
    assert again.status == 0, rounds.explain(again)
    assert [one["generation"] for one in series_of(place)] == [2, 1]


def test_figures_of_runs_are_there_whatever_came_of_them(work, place, job):
    file = work / "job.prom"
    good = into(place, job, "--name", "job", "--metrics-file", file)
    assert good.status == 0
    assert file.stat().st_mode & 0o777 == 0o644
    gone = gpuckpt("dump", "--pid-file", work / "none", "--into", place, "--name", "job", "--metrics-file", file)
    assert gone.status == 21
    text = file.read_text()
    for line in ("last_run_exit_status{L} 21", "runs_total{L} 2", "runs_failed_total{L} 1"):
        assert f"gpuckpt_{line}\n".replace("{L}", '{command="dump",name="job"}') in text
    assert f'_image_stored_bytes{{command="dump",name="job"}} {good.report["data"]["bytes_stored"]}\n' in text
    assert [path.name for path in work.iterdir() if path.name.startswith(".")] == []


def test_figures_that_cannot_be_written_change_nothing(work, place, job):
    precious = work / "precious"
    precious.write_text("root:x:0:0\n")
    for number, target in enumerate((precious, work / "no" / "x.prom", work)):
        answer = into(place, job, "--metrics-file", target)
        assert answer.status == 0
        assert "metrics-file" in answer.finding_ids, number
    assert precious.read_text() == "root:x:0:0\n"
    tried = into(place, job, "--metrics-file", work / "no" / "x.prom", "--dry-run")
    assert tried.status == 0
    [finding] = [one for one in tried.report["findings"] if one["id"] == "metrics-file"]
    assert finding["verdict"] == "fail"
    assert f"mkdir -p {work / 'no'}" in finding["hint"]
    assert not (work / "no").exists()
    name = images(place)[0]
    assert name.startswith(f"{Path(sys.executable).resolve().name}-{job.pid}-")


def test_a_dry_run_touches_nothing(place, job):
    answer = into(place, job, "--dry-run", "--keep", 1)
    assert (answer.status, answer.report["outcome"]) == (0, "planned")
    assert answer.report["data"]["image"].startswith(str(place))
    files = {one["path"]: one["needed"] for one in answer.report["data"]["files"]}
    assert set(files.values()) == {"in-image"}, "it stays running, so what it writes to is saved unasked"
    assert list(place.iterdir()) == []


def test_a_place_that_is_not_there(work, job):
    missing = into(work / "no", job)
    assert (missing.status, missing.report["process"]) == (21, "untouched")
    assert "mkdir -p" in missing.error["hint"]
    (work / "other").mkdir(mode=0o700)
    (work / "other" / "latest").mkdir()
    taken = into(work / "other", job)
    assert (taken.status, taken.report["process"]) == (20, "untouched")
    assert "no link" in taken.error["message"]

"""Workloads of tens of GiB, each alone on the host, and what the host itself can do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests import harness
from tests.gpu import jobs, rounds
from tests.gpu.rows import BIG_16, BIG_40, BIG_90, RATES, WORKLOADS, Row

pytestmark = [pytest.mark.gpu, pytest.mark.criu, pytest.mark.timeout(520)]

PATIENCE_SECONDS = 200.0
PROCEDURE = Path(__file__).parent / "plainprocedure.py"


@pytest.fixture
def lone_job(python_with_torch, tmp_path):
    """lone_job(row): started with nothing beside it; its start is a cold start."""
    started: list[jobs.Job] = []

    def start(row: Row) -> jobs.Job:
        started.append(jobs.start(row, python_with_torch, tmp_path))
        started[-1].await_start()
        return started[-1]

    yield start
    for job in started:
        job.end()


def warm(place: Path, gib: int) -> None:
    """Write as much as an image will hold, and remove it: a tmpfs on memory that the host has to find first is slow."""
    piece = os.urandom(64 << 20)
    with (place / "warm").open("wb") as file:
        for _ in range(gib * 16):
            file.write(piece)
    (place / "warm").unlink()


def test_rates(request, place, record, this_host, python_with_torch):
    """What every phase is compared with."""
    record.begin(request.node, RATES, **this_host)
    asked = [python_with_torch, WORKLOADS / "rates.py", place]
    done = subprocess.run([*map(str, asked)], capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr[-1500:]
    record(RATES, outcome="passed", rates=json.loads(done.stdout))


def test_big_16(request, lone_job, place, record, this_host):
    """The same process through gpuckpt, the plain procedure, and gpuckpt with --huge-pages, one after the other."""
    figures = record.begin(request.node, BIG_16.name, about=BIG_16.about, **this_host)
    job = lone_job(BIG_16)
    figures["cold_start_seconds"] = job.start_seconds
    warm(place, 20)
    rounds.round_trip(job, place / "packs", figures, patience=PATIENCE_SECONDS)
    rounds.remove(place / "packs")
    plain = figures["plain_procedure"] = plain_round(job, place / "plain")
    rounds.remove(place / "plain")
    huge = figures["huge_pages"] = {}
    rounds.round_trip(job, place / "huge", huge, "--huge-pages", patience=PATIENCE_SECONDS)
    rounds.remove(place / "huge")
    for name, one in (("ratios", figures), ("ratios_huge_pages", huge)):
        figures[name] = {
            "dump": plain["dump_wall_seconds"] / one["dump_wall_seconds"],
            "restore_to_running": plain["running_seconds"] / one["running_seconds"],
            "cold_start": figures["cold_start_seconds"] / one["running_seconds"],
        }
    record(BIG_16.name, outcome="passed")


def plain_round(job: jobs.Job, directory: Path) -> dict[str, Any]:
    """The plain procedure on the same process, held to the same standard."""
    digests, pids = job.digests(), job.pids()
    began = time.monotonic()
    figures: dict[str, Any] = {"dump_seconds": plain("dump", job.pid, directory)}
    figures["dump_wall_seconds"] = time.monotonic() - began
    rounds.await_gone(pids)
    figures["stored_bytes"] = sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())
    watch = rounds.FirstStep(job)
    began = time.monotonic()
    figures["restore_seconds"] = plain("restore", job.pid, directory)
    figures["restore_wall_seconds"] = time.monotonic() - began
    figures["running_seconds"] = watch.seconds()
    job.await_steps(5)
    assert job.digests() == digests
    job.assert_whole()
    return figures


def plain(verb: str, pid: int, directory: Path) -> dict[str, float]:
    """One half of it; the seconds by phase."""
    criu, why = harness.criu_or_reason()
    assert criu is not None, why
    argv = [sys.executable, str(PROCEDURE), verb, str(pid), str(directory), "--criu", criu]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=PATIENCE_SECONDS)
    assert done.returncode == 0, f"plain procedure, {verb}: {done.stdout}{done.stderr[-1500:]}"
    return json.loads(done.stdout)


def test_big_40(request, lone_job, place, record, this_host):
    figures = record.begin(request.node, BIG_40.name, about=BIG_40.about, **this_host)
    job = lone_job(BIG_40)
    figures["cold_start_seconds"] = job.start_seconds
    try:
        rounds.round_trip(job, place / "forty", figures, patience=PATIENCE_SECONDS)
        record(BIG_40.name, outcome="passed")
    finally:
        rounds.remove(place / "forty")


def test_big_90(request, lone_job, place, record, this_host):
    """The driver's copy and the image would both lie in this host's memory, so it has to say no, with figures.

    Asked with --dry-run first: a dump that is not refused would have the kernel end something.
    """
    figures = record.begin(request.node, BIG_90.name, about=BIG_90.about, **this_host)
    job = lone_job(BIG_90)
    figures["cold_start_seconds"] = job.start_seconds
    figures["room"] = {
        "available": memory_available(),
        "images": os.statvfs(place).f_bavail * os.statvfs(place).f_frsize,
    }
    rounds.refused(job, place / "ninety", figures, "--dry-run")
    said = rounds.refused(job, place / "ninety", figures)
    record(BIG_90.name, outcome=f"passed: refused ({said})")


def memory_available() -> int:
    """MemAvailable, bytes."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))

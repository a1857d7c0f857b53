"""Workloads of tens of GiB, each alone on the host, and what the host itself can do."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.gpu import rounds
from tests.gpu.rows import BIG_16, BIG_40, BIG_90, RATES, WORKLOADS

pytestmark = [pytest.mark.gpu, pytest.mark.criu, pytest.mark.timeout(520)]

PATIENCE_SECONDS = 200.0


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
    rounds.warm(place, 20)
    rounds.round_trip(job, place / "packs", figures, patience=PATIENCE_SECONDS)
    rounds.remove(place / "packs")
    plain = figures["plain_procedure"] = rounds.plain_round(job, place / "plain")
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

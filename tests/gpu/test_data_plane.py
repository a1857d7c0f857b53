"""The data plane on a real GPU: streamed dump and injected restore beside plain CRIU, in the same run."""

from __future__ import annotations

import json
import os
import shutil
import statistics
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import harness
from tests.gpu import rounds
from tests.gpu.jobs import Job
from tests.gpu.rows import BIG_16
from tests.gpu.test_main_job import PATIENT, host_row
from tests.harness import gpuckpt

pytestmark = [pytest.mark.gpu, pytest.mark.criu]

ROUNDS = int(os.environ.get("GPUCKPT_GPU_ROUNDS", "3"))
SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@pytest.mark.timeout(580)
def test_16_gib_beside_the_plain_procedure(lone_job, place, record, this_host):
    """One process, saved and brought back by gpuckpt, by hand, and with --huge-pages in every second round.

    Digests and values hold over all of it, and the host's setting is afterwards what it was.
    """
    job = lone_job(BIG_16)
    rounds.warm(place, 20)
    setting = SETTING.read_text()
    found: dict[str, list[dict]] = {"packs": [], "plain": [], "huge": []}
    for number in range(ROUNDS):
        found["packs"].append(one_round(job, place))
        found["plain"].append(rounds.plain_round(job, place / "plain"))
        rounds.remove(place / "plain")
        if number % 2 == 0:
            found["huge"].append(one_round(job, place, "--huge-pages"))
            assert SETTING.read_text() == setting
    record(
        "16 GiB, CUDA graph: gpuckpt and the plain procedure in turn",
        outcome="passed",
        rounds_each=ROUNDS,
        compared={name: compared(found, of) for name, of in CLOCKS.items()},
        rounds=found,
        **this_host,
    )


def one_round(job: Job, place: Path, *options: str) -> dict:
    """Dump, end, restore by gpuckpt; the figures of both."""
    figures: dict = {}
    rounds.round_trip(job, place / "packs", figures, *options, patience=rounds.PLAIN_SECONDS)
    rounds.remove(place / "packs")
    return figures


CLOCKS = {
    "capture": lambda one: one["dump_seconds"]["capture"],
    "frozen": lambda one: one.get("frozen_seconds", one["dump_wall_seconds"]),
    "dump, whole command": lambda one: one["dump_wall_seconds"],
    "criu and memory": lambda one: one["restore_seconds"]["criu"] + one["restore_seconds"].get("inject", 0.0),
    "restore to running": lambda one: one["running_seconds"],
}
"""By hand the process stands still from the first command of a dump to its end."""


def compared(found: dict[str, list[dict]], of: Callable[[dict], float]) -> dict[str, list[float]]:
    """[minimum, median] of each way, and how many times the plain procedure's are those of the others."""
    figures = {way: [min(map(of, ones)), statistics.median(map(of, ones))] for way, ones in found.items()}
    ratios = {f"ratio of {way}": _ratios(figures["plain"], figures[way]) for way in ("packs", "huge")}
    return {**figures, **ratios}


def _ratios(plain: list[float], ours: list[float]) -> list[float]:
    return [theirs / mine for theirs, mine in zip(plain, ours, strict=True)]


def test_a_second_dump_with_constant_weights_writes_little(torch_job, place, record):
    """--base: what the base holds is linked, not written."""
    job = torch_job(16.0, "--graph")
    first = gpuckpt("dump", "--tree", job.pid, place / "base", "--leave-running", "--settle", 0.2, **PATIENT)
    assert first.status == 0, first
    job.wait_past(job.steps()[-1] + 3)
    second = gpuckpt(
        "dump",
        "--tree",
        job.pid,
        place / "next",
        "--leave-running",
        "--settle",
        0.2,
        "--base",
        place / "base",
        **PATIENT,
    )
    assert second.status == 0, second
    written = second.report["data"]["bytes_stored"] - second.report["data"].get("bytes_shared", 0)
    manifest = json.loads((place / "next" / "manifest.json").read_text())
    record(
        "PyTorch, 16 GiB, second dump with --base",
        outcome="passed",
        first_seconds=first.report["data"]["seconds"],
        second_seconds=second.report["data"]["seconds"],
        first_stored=first.report["data"]["bytes_stored"],
        second_written=written,
        share=written / first.report["data"]["bytes_stored"],
        frozen=[first.report["data"]["frozen_seconds"], second.report["data"]["frozen_seconds"]],
        parts=len(manifest["parts"]),
        **host_row(place / "next"),
    )
    shutil.rmtree(place / "base")  # an image depends on no other's directory
    job.wait_past(job.steps()[-1] + 2)
    before = job.checksums()
    job.end()
    restored = gpuckpt("restore", place / "next", "--settle", 0.2, **PATIENT)
    assert restored.status == 0, restored
    harness.wait_for(lambda: job.checksums() == before, "the weights are back")
    shutil.rmtree(place / "next")
    assert written <= 0.05 * first.report["data"]["bytes_stored"]

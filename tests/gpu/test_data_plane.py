"""The data plane on a real GPU: streamed dump and injected restore beside plain CRIU, in the same run."""

from __future__ import annotations

import json
import os
import shutil
import statistics
import time
from pathlib import Path

import pytest

from tests import harness
from tests.gpu.test_main_job import PATIENT, host_row
from tests.harness import gpuckpt

pytestmark = [pytest.mark.gpu, pytest.mark.criu]

ROUNDS = int(os.environ.get("GPUCKPT_GPU_ROUNDS", "3"))
BOTH_VERBS = ("--plain", "--huge-pages")


def one_round(job, image, *options) -> dict:
    """Dump, end, restore; the phases' seconds and the walls of both commands."""
    began = time.monotonic()
    dumped = gpuckpt("dump", "--tree", job.pid, image, *options, **PATIENT)
    dump_wall = time.monotonic() - began
    assert dumped.status == 0, dumped
    job.process.poll()
    harness.wait_for(lambda: not Path(f"/proc/{job.pid}").exists(), "the pid is free")
    last = job.steps()[-1]
    began = time.monotonic()
    restored = gpuckpt("restore", image, "--settle", 0.2, *(o for o in options if o in BOTH_VERBS), **PATIENT)
    restore_wall = time.monotonic() - began
    assert restored.status == 0, restored
    job.wait_past(last + 2)
    data, back = dumped.report["data"], restored.report["data"]
    return {
        "dump": data["seconds"],
        "frozen": data["frozen_seconds"],
        "dump_wall": dump_wall,
        "stored": data["bytes_stored"],
        "restore": back["seconds"],
        "restore_wall": restore_wall,
        "injected": back.get("bytes_injected"),
        "by_criu": back.get("bytes_by_criu"),
        "notes": data["notes"] + back["notes"],
    }


def warm(place: Path, gigabytes: int) -> None:
    """Write as much as an image will hold, and remove it: a tmpfs on memory that the host has to find first is slow."""
    piece = os.urandom(1 << 20) * 64
    with (place / "warm").open("wb") as file:
        for _ in range(gigabytes * 16):
            file.write(piece)
    (place / "warm").unlink()


def test_16_gib_streamed_and_injected_beside_plain(torch_job, place, record):
    """Alternating rounds of the same process; checksums and the graph's counter hold over all of them."""
    job = torch_job(16.0, "--graph")
    before = job.checksums()
    warm(place, 20)
    rounds: dict[str, list[dict]] = {"packs": [], "plain": []}
    for number in range(ROUNDS):
        for way, options in (("packs", ()), ("plain", ("--plain",))):
            image = place / f"{way}{number}"
            rounds[way].append(one_round(job, image, *options))
            row = host_row(image)
            shutil.rmtree(image)
    assert job.checksums() == before
    job.assert_no_step_lost()
    capture = {way: [r["dump"]["capture"] for r in rounds[way]] for way in rounds}
    legs = {way: [r["restore"]["criu"] + r["restore"].get("inject", 0.0) for r in rounds[way]] for way in rounds}
    record(
        "PyTorch, 16 GiB, CUDA graph: streamed into packs and injected, beside plain CRIU, alternating",
        outcome="passed",
        capture_seconds=capture,
        restore_leg_seconds=legs,
        best_capture={way: min(capture[way]) for way in capture},
        dump_ratio=statistics.median(capture["plain"]) / statistics.median(capture["packs"]),
        restore_ratio=statistics.median(legs["plain"]) / statistics.median(legs["packs"]),
        rounds=rounds,
        **row,
    )


def test_huge_pages(torch_job, place, record):
    """The driver's copies with and without; the host's setting is afterwards what it was."""
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    before = setting.read_text()
    job = torch_job(16.0, "--graph")
    sums = job.checksums()
    warm(place, 20)
    rounds = {}
    for way, options in (("as it is", ()), ("--huge-pages", ("--huge-pages",))):
        image = place / "image"
        rounds[way] = one_round(job, image, *options)
        row = host_row(image)
        shutil.rmtree(image)
        assert setting.read_text() == before
    assert job.checksums() == sums
    job.assert_no_step_lost()
    record("PyTorch, 16 GiB, with and without --huge-pages", outcome="passed", rounds=rounds, setting=before, **row)


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

"""The main job on a real GPU: a PyTorch process saved, ended, and going on where it stopped."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path

import pytest

from tests import harness
from tests.harness import gpuckpt

pytestmark = [pytest.mark.gpu, pytest.mark.criu]

PATIENT = {"timeout": 300}


def host_row(image: Path) -> dict:
    """GPU, driver and CRIU out of the image itself."""
    host = json.loads((image / "manifest.json").read_text())["host"]
    return {
        "gpu": host["gpu"]["gpus"][0]["name"],
        "driver": host["gpu"]["version"],
        "criu": host["criu"]["version"],
        "kernel": host["kernel"],
        "cores": host["cpu"]["cores"],
    }


@pytest.mark.parametrize("gib", [16.0])
def test_16_gib_and_a_cuda_graph(torch_job, place, record, gib):
    """Checksums and the graph's counter are equal, and no step ran between the cut and the restore."""
    job = torch_job(gib, "--graph")
    before = job.checksums()
    job.wait_past(job.steps()[-1] + 5)
    began = time.monotonic()
    dumped = gpuckpt("dump", "--tree", job.pid, place / "main", **PATIENT)
    dump_wall = time.monotonic() - began
    assert (dumped.status, dumped.report["process"]) == (0, "ended"), dumped
    job.process.wait(30)
    steps = job.steps()
    began = time.monotonic()
    restored = gpuckpt("restore", place / "main", "--settle", 0.2, **PATIENT)
    restore_wall = time.monotonic() - began
    assert (restored.status, restored.report["process"]) == (0, "restored"), restored
    job.wait_past(steps[-1] + 5)
    assert job.steps()[: len(steps)] == steps
    assert job.checksums() == before
    job.assert_no_step_lost()
    data = dumped.report["data"]
    record(
        f"PyTorch, {gib:g} GiB of tensors, captured CUDA graph: dump, end, restore",
        outcome="passed",
        image_bytes=data["bytes_stored"],
        dump_seconds=data["seconds"],
        frozen_seconds=data["frozen_seconds"],
        dump_wall_seconds=dump_wall,
        restore_seconds=restored.report["data"]["seconds"],
        restore_wall_seconds=restore_wall,
        cold_start_seconds=job.start_seconds,
        gpu_memory_bytes=restored.report["data"]["gpu_memory_bytes"],
        **host_row(place / "main"),
    )
    shutil.rmtree(place / "main")


def test_leave_running(torch_job, place, record):
    job = torch_job(2.0, "--graph")
    before = job.checksums()
    dumped = gpuckpt("dump", "--tree", job.pid, place / "running", "--leave-running", "--settle", 1, **PATIENT)
    assert (dumped.status, dumped.report["process"]) == (0, "running"), dumped
    job.wait_past(job.steps()[-1] + 5)
    assert job.checksums() == before
    job.assert_no_step_lost()
    steps = job.steps()
    job.end()
    restored = gpuckpt("restore", place / "running", "--settle", 0.2, **PATIENT)
    assert restored.status == 0, restored
    harness.wait_for(lambda: len(job.steps()) > len(steps) + 3, "steps after the restore of the older state")
    assert job.checksums() == before
    record(
        "PyTorch, 2 GiB, --leave-running, then a restore of that image",
        outcome="passed",
        dump_seconds=dumped.report["data"]["seconds"],
        frozen_seconds=dumped.report["data"]["frozen_seconds"],
        **host_row(place / "running"),
    )
    shutil.rmtree(place / "running")


def test_three_rounds(torch_job, place, record):
    job = torch_job(2.0, "--graph")
    before = job.checksums()
    for generation in (1, 2, 3):
        image = place / f"round{generation}"
        dumped = gpuckpt("dump", "--tree", job.pid, image, **PATIENT)
        assert dumped.status == 0, dumped
        job.process.poll()
        harness.wait_for(lambda: not Path(f"/proc/{job.pid}").exists(), "the pid is free")
        assert json.loads((image / "manifest.json").read_text())["lineage"]["generation"] == generation
        last = job.steps()[-1]
        restored = gpuckpt("restore", image, "--settle", 0.2, **PATIENT)
        assert restored.status == 0, restored
        job.wait_past(last + 3)
        assert job.checksums() == before
    job.assert_no_step_lost()
    record("PyTorch, 2 GiB, three rounds of dump, restore, dump", outcome="passed", **host_row(place / "round1"))

"""The main job on a real GPU: a PyTorch process saved, ended, and going on where it stopped."""

from __future__ import annotations

import json
import os
import shutil
import signal
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


def act_begun(act: str, main_pid: int) -> bool:
    """The journal of this gpuckpt's run has come to `act`."""
    for journal in Path("/run/gpuckpt/runs").glob("*/journal"):
        try:
            card = json.loads((journal.parent / "run.json").read_text())
        except (OSError, ValueError):
            continue
        if card["pid"] == main_pid and f'"act": "{act}"' in journal.read_text(errors="replace"):
            return True
    return False


def owner_of(main_pid: int) -> int:
    children = Path(f"/proc/{main_pid}/task/{main_pid}/children").read_text().split()
    return next(int(pid) for pid in children if b"gpuckpt.owner.process" in Path(f"/proc/{pid}/cmdline").read_bytes())


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


@pytest.mark.parametrize("who", ["main", "owner", "both"])
@pytest.mark.parametrize("act", ["lock", "checkpoint", "criu-started", "at-gate"])
def test_killed_in_a_dump(torch_job, place, record, who, act):
    """kill -9 in the middle of a dump: the job goes on, by itself or by `restore --tree`."""
    job = torch_job(4.0, "--graph", *(("--busy", "1.0") if act == "lock" else ()))
    before = job.checksums()
    image = place / f"killed-{who}-{act}"
    run = harness.start_gpuckpt("dump", "--tree", job.pid, image)
    harness.wait_for(lambda: act_begun(act, run.pid), f"the journal says {act}")
    victims = {"main": [run.pid], "owner": [owner_of(run.pid)], "both": [run.pid, owner_of(run.pid)]}[who]
    for pid in victims:
        os.kill(pid, signal.SIGKILL)
    stdout, stderr = run.communicate(timeout=200)
    left = cuda_state(job.pid)
    status, repaired = run.returncode, None
    if who == "both":
        repaired = gpuckpt("restore", "--tree", job.pid, **PATIENT)
        assert (repaired.status, repaired.report["process"]) == (0, "running"), repaired
    if who == "owner":
        assert status == 30, (stdout, stderr)
    last = job.steps()[-1]
    job.wait_past(last + 3, 120)
    assert job.checksums() == before
    job.assert_no_step_lost()
    assert not image.exists() or (image / "manifest.json").exists()
    shutil.rmtree(image, ignore_errors=True)
    record(
        f"kill -9 of {who} at `{act}` of a dump (4 GiB)",
        outcome="passed: the job goes on" + (" after `restore --tree`" if repaired else ""),
        seen_right_after=left,
        status=status,
    )


def cuda_state(pid: int) -> str:
    """What inspect sees of the job right after the kill."""
    seen = gpuckpt("inspect", "--tree", pid, **PATIENT)
    if seen.status:
        return seen.error["message"]
    tree = seen.report["data"]["tree"]
    states = [(one["state"], cuda["state"]) for one in tree["processes"] for cuda in tree["cuda"]]
    return f"process {states[0][0]}, CUDA {states[0][1]}" if states else "no CUDA process seen"


@pytest.mark.parametrize("who", ["main", "owner"])
def test_killed_in_a_restore(torch_job, place, record, who):
    """kill -9 in the CUDA restore: a whole, running tree or none; the image restores afterwards."""
    job = torch_job(8.0, "--graph")
    before = job.checksums()
    image = place / f"killed-restore-{who}"
    assert gpuckpt("dump", "--tree", job.pid, image, **PATIENT).status == 0
    job.process.wait(30)
    run = harness.start_gpuckpt("restore", image, "--settle", "0.2")
    harness.wait_for(lambda: act_begun("cuda-restore", run.pid), "the CUDA restore has begun")
    os.kill(run.pid if who == "main" else owner_of(run.pid), signal.SIGKILL)
    stdout, _ = run.communicate(timeout=200)
    if who == "owner":
        assert run.returncode == 40, stdout
        harness.wait_for(lambda: not Path(f"/proc/{job.pid}").exists(), "nothing is left of the half-built tree")
        restored = gpuckpt("restore", image, "--settle", 0.2, **PATIENT)
        assert restored.status == 0, restored
    job.wait_past(job.steps()[-1] + 3, 120)
    assert job.checksums() == before
    job.assert_no_step_lost()
    shutil.rmtree(image)
    record(f"kill -9 of {who} in the CUDA restore (8 GiB)", outcome="passed", status=run.returncode)

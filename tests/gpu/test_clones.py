"""Clones of one CUDA process on real GPUs: three on one GPU, two on two. Written without a GPU: not run so far.

What they rest on was seen with a prototype (two clones on one H200, each in its own pid and network namespace); that
gpuckpt itself does it is proved on the CPU and with the fake driver only (tests/e2e/test_isolation.py).
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from tests import cloning, harness
from tests.harness import gpuckpt

pytestmark = [pytest.mark.gpu, pytest.mark.criu]

PATIENT = {"timeout": 150}
GIB = 2.0


@pytest.fixture
def clones():
    """Reports of clones; their namespaces end with the test."""
    found: list[dict] = []
    yield found
    for data in found:
        with contextlib.suppress(ProcessLookupError):
            os.kill(data["init_pid"], signal.SIGKILL)
        harness.wait_for(lambda data=data: not cloning.inside(data["init_pid"]), "the clone has ended")


def clone(image: Path, clones: list[dict], *options: object) -> dict:
    answer = gpuckpt("restore", image, "--clone", "--netns", "new", "--settle", 0.5, *options, **PATIENT)
    assert (answer.status, answer.report["process"]) == (0, "restored"), answer
    clones.append(answer.report["data"])
    return clones[-1]


def saved(torch_job, place: Path, gib: float):
    """A job, its image, and its checksums; it has ended. Its log is opened anew for each line: clones share it."""
    job = torch_job(gib, "--graph")
    before = job.checksums()
    answer = gpuckpt("dump", "--tree", job.pid, place / "clones", **PATIENT)
    assert answer.status == 0, answer
    job.process.wait(60)
    return job, place / "clones", before


def checksums_of(job, data: dict) -> list[str]:
    """What one clone says of all its tensors; only one is asked at a time."""
    said = len([words for words in job.lines() if words[0] == "XSUM"])
    os.kill(data["root_pid"], signal.SIGUSR1)
    harness.wait_for(lambda: len([w for w in job.lines() if w[0] == "XSUM"]) > said, "checksums", 120)
    return [words for words in job.lines() if words[0] == "XSUM"][-1][1:]


def test_three_clones_on_one_gpu(torch_job, place, record, clones):
    job, image, before = saved(torch_job, place, GIB)
    for _ in range(3):
        clone(image, clones)
    assert len({data["root_pid"] for data in clones}) == 3
    for data in clones:
        assert data["namespace_pids"] == [job.pid]
        assert list(data["gpu_memory_bytes"]) == [str(data["root_pid"])]
        assert checksums_of(job, data) == before
    os.kill(clones[0]["root_pid"], signal.SIGKILL)
    harness.wait_for(lambda: not cloning.inside(clones[0]["init_pid"]), "the first clone has ended")
    assert all(checksums_of(job, data) == before for data in clones[1:])
    record(
        "three clones of one CUDA process (2 GiB) on one GPU",
        outcome="passed",
        restore_seconds=[data["seconds"] for data in clones],
    )
    del clones[0]
    shutil.rmtree(image)


def test_two_clones_on_two_gpus(torch_job, place, record, clones):
    """Every GPU that the process saw is named: the driver takes no map that leaves one out."""
    seen = subprocess.run(
        ["nvidia-smi", "--query-gpu=uuid", "--format=csv,noheader"], capture_output=True, text=True, timeout=60
    )
    if len(seen.stdout.split()) < 2:
        pytest.skip("needs two GPUs")
    job, image, before = saved(torch_job, place, GIB)
    manifest = json.loads((image / "manifest.json").read_text())
    clone(image, clones)
    clone(image, clones, "--gpu", "0=1", "--gpu", "1=0")
    used = seen_on(clones)
    assert used[0] & used[1] == set(), used
    for data in clones:
        assert checksums_of(job, data) == before
    record(
        "two clones of one CUDA process (2 GiB) on two GPUs",
        outcome="passed",
        driver=manifest["host"]["gpu"]["version"],
        restore_seconds=[data["seconds"] for data in clones],
    )
    shutil.rmtree(image)


def seen_on(clones: list[dict]) -> list[set[str]]:
    """The GPUs on which each clone has memory, as the driver says."""
    asked = ["nvidia-smi", "--query-compute-apps=pid,gpu_uuid", "--format=csv,noheader"]
    lines = subprocess.run(asked, capture_output=True, text=True, timeout=60, check=True).stdout.splitlines()
    pairs = [tuple(part.strip() for part in line.split(",")) for line in lines]
    return [{uuid for pid, uuid in pairs if int(pid) == data["root_pid"]} for data in clones]

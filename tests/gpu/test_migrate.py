"""migrate of a CUDA process, through a real sshd, to a host of its own pids and files beside this one, on the same GPUs."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests import harness
from tests.fakegpu.fixtures import FakeGpu
from tests.harness import PROGRAMS, Answer, gpuckpt
from tests.twohosts import FarHost

pytestmark = pytest.mark.criu

PATIENT = {"timeout": 300}
GIB = 2.0
PARTS = (
    "frozen_seconds",
    "downtime_seconds",
    "bytes_sent",
    "bytes_skipped",
    "bytes_per_second",
    "connections",
    "seconds",
)


def pids_apart_from(pid: int) -> int:
    """Where pids of another host may begin, so that a job's are free there."""
    most = int(Path("/proc/sys/kernel/pid_max").read_text())
    return pid + 10_000 if pid + 15_000 < most else 1_000


def moved(far: FarHost, pid: int, *options: object) -> Answer:
    """A migration that must work: what ran here has ended. The image goes through memory there, as it came."""
    answer = gpuckpt("migrate", "--tree", pid, "b:/dev/shm", *far.reach, "--settle", 0.2, *options, **PATIENT)
    said = (answer.status, answer.report["outcome"], answer.report["process"])
    assert said == (0, "ok", "restored"), (answer.error, answer.stderr[-3000:])
    return answer


def copy_of(far: FarHost, pid: int) -> int:
    """The job there, as this machine knows it."""
    found = [outer for outer, inner in far.b.pids() if inner == pid]
    assert len(found) == 1, (pid, far.b.pids())
    return found[0]


def test_a_program_without_a_gpu_moves(far_host, jobs, tmp_path):
    """What the others do, with nothing but CRIU: what fails here is no matter of the driver."""
    log = tmp_path / "log"
    job = jobs.python("counter.py", log, 40, cwd="/")
    harness.wait_for_count(log, 3)
    far = far_host(pids_apart_from(job.pid))
    answer = moved(far, job.pid, "--pre-seed")
    job.wait(30)
    assert harness.alive(copy_of(far, job.pid))
    harness.wait_for_count(log, harness.numbers(log)[-1] + 3)
    harness.assert_gapless(log)
    data = answer.report["data"]
    assert 0 < data["downtime_seconds"] <= data["frozen_seconds"]
    assert data["seed"]["bytes_sent"] > 40_000_000 > data["bytes_sent"]


def test_a_program_on_a_driver_that_is_fake_moves(far_host, jobs, tmp_path, fake_gpu_libraries, monkeypatch):
    """As with a real one: the driver is called from a pid namespace of its own."""
    here, there = (FakeGpu(tmp_path / name, fake_gpu_libraries) for name in ("gpu", "gpu-there"))
    for gpu in (here, there):
        gpu.configure(total=8 << 30)
    monkeypatch.setenv("FAKEGPU_DIR", str(here.directory))
    monkeypatch.setenv("LD_LIBRARY_PATH", str(here.directory / "lib"))
    log = tmp_path / "log"
    program = PROGRAMS.parent / "fakegpu" / "fake_cuda_app.py"
    job = jobs.start(
        sys.executable, program, log, "--mib", 16, cwd="/", env={**os.environ, "PYTHONPATH": str(PROGRAMS.parents[1])}
    )
    harness.wait_for_count(log, 3)
    far = far_host(pids_apart_from(job.pid))
    far.b.run("mount", "--bind", there.directory, here.directory)
    figures(moved(far, job.pid))
    job.wait(30)
    assert harness.alive(copy_of(far, job.pid))
    harness.wait_for_count(log, harness.numbers(log)[-1] + 3)
    assert (here.used_bytes(), there.used_bytes()) == (0, 16 << 20)


def goes_on(far: FarHost, job, before: list[str]) -> None:
    """The job ended here, and goes on there: all tensors as they were, no step lost. It is `job.pid` from now on."""
    assert job.process.wait(60) is not None
    last = job.steps()[-1]
    job.pid = copy_of(far, job.pid)
    job.wait_past(last + 5, 120)
    assert job.checksums() == before
    job.assert_no_step_lost()


def figures(answer: Answer) -> dict:
    """What a migration took, by its parts."""
    data = answer.report["data"]
    assert 0 < data["downtime_seconds"] <= data["frozen_seconds"]
    assert {"lock", "gpu_to_host", "capture", "prepare", "go", "host_to_gpu"} <= set(data["seconds"])
    return {key: data[key] for key in PARTS if key in data}


@pytest.mark.gpu
@pytest.mark.parametrize("options", [(), ("--pre-seed",)], ids=["at-once", "pre-seed"])
def test_a_cuda_process_moves_to_a_host_with_the_same_gpu(torch_job, far_host, record, options):
    """--pre-seed: the tensors are constant, so that nearly nothing is sent while the job stands still."""
    job = torch_job(GIB, "--graph")
    before = job.checksums()
    far = far_host(pids_apart_from(job.pid))
    answer = moved(far, job.pid, *options)
    goes_on(far, job, before)
    data, seed = answer.report["data"], {}
    if options:
        seed = data["seed"]
        assert seed["bytes_sent"] > GIB * (1 << 30) * 0.5
        assert data["bytes_sent"] < seed["bytes_sent"] / 4
    record(
        f"PyTorch, {GIB:g} GiB, CUDA graph: migrate {shlex.join(options)} over sshd to another pid namespace, same GPU",
        outcome="passed",
        **figures(answer),
        **({"seed": seed} if seed else {}),
    )


@pytest.mark.gpu
def test_a_cuda_process_moves_to_the_other_gpu(torch_job, far_host, record):
    """Every GPU that the process saw is named: the driver takes no map that leaves one out."""
    asked = ["nvidia-smi", "--query-gpu=uuid", "--format=csv,noheader"]
    uuids = subprocess.run(asked, capture_output=True, text=True, timeout=60).stdout.split()
    if len(uuids) < 2:
        pytest.skip("needs two GPUs")
    job = torch_job(GIB, "--graph")
    before = job.checksums()
    far = far_host(pids_apart_from(job.pid))
    ring = [f"{number}={(number + 1) % len(uuids)}" for number in range(len(uuids))]
    answer = moved(far, job.pid, *(word for pair in ring for word in ("--gpu", pair)))
    goes_on(far, job, before)
    assert used_by(job.pid) == {uuids[1]}
    record(
        f"PyTorch, {GIB:g} GiB, CUDA graph: migrate over sshd to another pid namespace, GPU 0 -> 1",
        outcome="passed",
        **figures(answer),
    )


def used_by(pid: int) -> set[str]:
    """The GPUs on which a process has memory, as the driver says."""
    asked = ["nvidia-smi", "--query-compute-apps=pid,gpu_uuid", "--format=csv,noheader"]
    lines = subprocess.run(asked, capture_output=True, text=True, timeout=60, check=True).stdout.splitlines()
    pairs = [tuple(part.strip() for part in line.split(",")) for line in lines]
    return {uuid for owner, uuid in pairs if int(owner) == pid}

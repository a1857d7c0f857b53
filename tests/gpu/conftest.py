"""What the GPU tests share: a real PyTorch program, the results file, and why they are skipped elsewhere."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests import harness
from tests.gpu import jobs
from tests.gpu.recording import Recorder
from tests.gpu.rows import Row
from tests.gpu.survivor import Hog, Survivors, evidence

PROGRAM = Path(__file__).parent.parent / "programs" / "gpu_counter.py"
HOG = PROGRAM.with_name("gpu_hog.py")
START_SECONDS = 180.0


def torch_python() -> str | None:
    """A python3 that imports PyTorch with CUDA; the tests' own environment may not have it."""
    for directory in os.environ.get("PATH", "").split(os.pathsep):
        python = shutil.which("python3", path=directory)
        if python is None:
            continue
        probe = "import torch, sys; sys.exit(not torch.cuda.is_available())"
        if subprocess.run([python, "-c", probe], capture_output=True, timeout=120).returncode == 0:
            return python
    return None


@pytest.fixture(scope="session")
def python_with_torch():
    python = torch_python()
    if python is None:
        pytest.skip("no python3 here imports PyTorch with a GPU")
    return python


@pytest.fixture(scope="session")
def place():
    """A directory on tmpfs for images: the tests measure gpuckpt, not this host's disk."""
    directory = Path("/dev/shm") / f"gpuckpt-gpu-tests-{os.getpid()}"
    directory.mkdir(mode=0o700)
    yield directory
    shutil.rmtree(directory, ignore_errors=True)


RECORDER = pytest.StashKey[Recorder]()


def pytest_configure(config: pytest.Config) -> None:
    """One file of rows for this run."""
    config.stash[RECORDER] = Recorder(Path(os.environ.get("GPUCKPT_GPU_OUT", "gpu-results")))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item):
    """On a GPU host (run.sh names a folder for the results) failures and skips are results too."""
    report = yield
    if "GPUCKPT_GPU_OUT" in os.environ:
        item.config.stash[RECORDER].note(item, report)
    return report


@pytest.fixture(scope="session")
def record(request):
    """record(row, **figures): what a GPU run proved, for tests/gpu/RESULTS.md."""
    return request.config.stash[RECORDER]


@pytest.fixture(scope="session")
def this_host():
    """GPU, driver, CRIU and kernel, for every row; skips where there is no GPU."""
    host = harness.gpuckpt("inspect").report["data"]["host"]
    if not host["gpu"]["gpus"]:
        pytest.skip("no NVIDIA GPU here")
    return {
        "gpu": host["gpu"]["gpus"][0]["name"],
        "gpus": len(host["gpu"]["gpus"]),
        "driver": host["gpu"]["version"],
        "criu": host["criu"]["version"],
        "kernel": host["kernel"],
        "cores": host["cpu"]["cores"],
    }


class TorchJob:
    """A running gpu_counter.py."""

    def __init__(self, python: str, log: Path, gib: float, *options: str) -> None:
        self.log = log
        self.errors = log.with_suffix(".err")
        with self.errors.open("w") as errors:
            self.process = subprocess.Popen(
                [python, str(PROGRAM), str(log), str(gib), *options],
                stdin=subprocess.DEVNULL,
                stdout=errors,
                stderr=errors,
                start_new_session=True,
                cwd="/",
            )
        self.pid = self.process.pid
        began = time.monotonic()
        self.wait_past(0, START_SECONDS)
        self.start_seconds = time.monotonic() - began

    def lines(self) -> list[list[str]]:
        return [line.split() for line in self.log.read_text().splitlines()] if self.log.exists() else []

    def steps(self) -> list[int]:
        return [int(words[0]) for words in self.lines() if words and words[0].isdigit()]

    def wait_past(self, step: int, seconds: float = 60.0) -> None:
        def came_past() -> bool:
            assert self.process.poll() is None or harness.alive(self.pid), self.errors.read_text()
            return bool(self.steps()) and self.steps()[-1] > step

        harness.wait_for(came_past, f"a step after {step}: {self.errors.read_text()[-500:]}", seconds)

    def checksums(self) -> list[str]:
        """The exact checksums of all tensors, told by the process itself."""
        before = len([words for words in self.lines() if words[0] == "XSUM"])
        os.kill(self.pid, signal.SIGUSR1)
        harness.wait_for(lambda: len([w for w in self.lines() if w[0] == "XSUM"]) > before, "checksums", 120)
        return [words for words in self.lines() if words[0] == "XSUM"][-1][1:]

    def assert_no_step_lost(self) -> None:
        """Steps rise by one, and the graph's counter on the GPU equals the step."""
        steps = self.steps()
        assert steps == list(range(1, len(steps) + 1)), steps[-20:]
        for words in self.lines():
            if words[0].isdigit() and "graph" in words:
                assert words[words.index("graph") + 1] == words[0], words

    def end(self) -> None:
        """End it, and reap it where it is our child, so that its pid is free."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

        def gone() -> bool:
            self.process.poll()
            return not Path(f"/proc/{self.pid}").exists()

        harness.wait_for(gone, "the job's end")


@pytest.fixture
def torch_job(python_with_torch, tmp_path):
    """start(gib, *options): PyTorch programs that end with the test."""
    started: list[TorchJob] = []

    def start(gib: float, *options: str) -> TorchJob:
        started.append(TorchJob(python_with_torch, tmp_path / f"job{len(started)}.log", gib, *options))
        return started[-1]

    yield start
    for job in started:
        job.end()


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


@pytest.fixture(scope="session")
def survivors(python_with_torch, tmp_path_factory):
    """The job that all tests with a `survivor` share, one after the other."""
    directory, started = tmp_path_factory.mktemp("survivors"), []

    def start(gib: float, *options: str) -> TorchJob:
        started.append(TorchJob(python_with_torch, directory / f"job{len(started)}.log", gib, *options))
        return started[-1]

    shared = Survivors(start)
    yield shared
    shared.spoil()


@pytest.fixture
def survivor(request, survivors):
    """A PyTorch process of 1 GiB with a captured graph, which the test must leave running."""
    failed, job = request.session.testsfailed, survivors.fit()
    yield job
    if request.session.testsfailed > failed:
        print(evidence(job))
        survivors.spoil()


@pytest.fixture
def hog(python_with_torch, tmp_path):
    """Another process on GPU 0, which has taken nothing yet."""
    started = Hog(python_with_torch, HOG, tmp_path / "hog.err")
    try:
        started.await_answer("ready", START_SECONDS)
        yield started
    finally:
        started.end()

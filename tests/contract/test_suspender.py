"""What every Suspender must do: over the fake driver by both ways, and over a real GPU."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from gpuckpt.accelerators import cuda, cuda_program
from gpuckpt.accelerators.nvidia import Nvidia
from gpuckpt.accelerators.protocol import DriverError
from gpuckpt.model.errors import MachineLacks
from gpuckpt.system import commands

PROGRAMS = Path(__file__).parent.parent / "programs"
START_SECONDS = 120
"""The first import of PyTorch on a cold machine."""

FILL_GPU = """
import sys, time, torch
free, _total = torch.cuda.mem_get_info()
hold = torch.empty(free - (256 << 20), dtype=torch.uint8, device="cuda")
print("full", flush=True)
time.sleep(600)
"""


class FakeBench:
    """Fake CUDA processes."""

    def __init__(self, gpu, start, suspender):
        self.gpu, self.start_app, self.suspender = gpu, start, suspender

    def start(self, *, busy_seconds=0.0):
        return self.start_app("--mib", "8", "--kernel-ms", str(int(busy_seconds * 1000) or 10))

    @contextlib.contextmanager
    def full_gpu(self):
        self.gpu.configure(others_0=(1 << 30) - (1 << 20))
        yield
        self.gpu.configure(others_0=0)


class TorchApp:
    """A started gpu_counter.py; the same questions as to a fake_cuda_app.py."""

    def __init__(self, python, log, *options):
        self.log = log
        argv = [python, str(PROGRAMS / "gpu_counter.py"), str(log), "0.5", "--graph", *options]
        self.process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, start_new_session=True, cwd="/")
        self.pid = self.process.pid
        self.wait_for_steps(1, START_SECONDS)

    def lines(self):
        return self.log.read_text().splitlines() if self.log.exists() else []

    def steps(self):
        return [int(line.split()[0]) for line in self.lines() if line[0].isdecimal()]

    def wait_for_steps(self, more, timeout=20.0):
        start, end = len(self.steps()), time.monotonic() + timeout
        while len(self.steps()) < start + more:
            assert self.process.poll() is None, "the PyTorch process ended"
            assert time.monotonic() < end, f"no {more} steps within {timeout} s"
            time.sleep(0.01)

    def checksum(self):
        count, end = len([line for line in self.lines() if line.startswith("XSUM")]), time.monotonic() + 30
        os.kill(self.pid, signal.SIGUSR1)
        while len(found := [line for line in self.lines() if line.startswith("XSUM")]) <= count:
            assert time.monotonic() < end, "no checksum"
            time.sleep(0.01)
        return found[-1]

    def stop(self):
        self.process.kill()
        self.process.wait(30)


class GpuBench:
    """PyTorch processes on a real GPU."""

    def __init__(self, python, directory, suspender):
        self.python, self.directory, self.suspender = python, directory, suspender
        self.apps = []

    def start(self, *, busy_seconds=0.0):
        options = ["--busy", str(busy_seconds)] if busy_seconds else []
        self.apps.append(TorchApp(self.python, self.directory / f"gpu{len(self.apps)}.log", *options))
        return self.apps[-1]

    @contextlib.contextmanager
    def full_gpu(self):
        filler = subprocess.Popen([self.python, "-c", FILL_GPU], stdout=subprocess.PIPE)
        try:
            assert filler.stdout.readline() == b"full\n"
            yield
        finally:
            filler.kill()
            filler.communicate(timeout=60)
        time.sleep(1)


def torch_python():
    """A Python that can use PyTorch on a GPU."""
    if not Nvidia().present():
        pytest.skip("no NVIDIA driver here")
    test = "import torch; assert torch.cuda.is_available()"
    for python in dict.fromkeys(filter(None, (shutil.which("python3"), sys.executable))):
        if (
            subprocess.run([python, "-c", test], check=False, capture_output=True, timeout=START_SECONDS).returncode
            == 0
        ):
            return python
    pytest.skip("no Python with PyTorch that sees a GPU")


def gpu_bench(tmp_path, *, force_program):
    python = torch_python()
    if force_program and commands.find_program("cuda-checkpoint") is None:
        pytest.skip("the program cuda-checkpoint is not here")
    try:
        suspender = Nvidia().suspender(force_program=force_program)
    except MachineLacks as error:
        pytest.skip(str(error))
    return GpuBench(python, tmp_path, suspender)


@pytest.fixture(
    params=[
        "fake-api",
        "fake-program",
        pytest.param("gpu-api", marks=pytest.mark.gpu),
        pytest.param("gpu-program", marks=pytest.mark.gpu),
    ]
)
def bench(request, tmp_path, monkeypatch):
    if request.param.startswith("gpu"):
        real = gpu_bench(tmp_path, force_program=request.param == "gpu-program")
        yield real
        for app in real.apps:
            app.stop()
        return
    fake_gpu = request.getfixturevalue("fake_gpu")
    for name, value in fake_gpu.variables.items():
        monkeypatch.setenv(name, value)
    api = request.param == "fake-api"
    suspender = (
        cuda.CudaApi(cuda.load(fake_gpu.libcuda), initialise=True)
        if api
        else cuda_program.CudaProgram(fake_gpu.program)
    )
    yield FakeBench(fake_gpu, request.getfixturevalue("start_fake_cuda_app"), suspender)


def code_of(call, *arguments):
    with pytest.raises(DriverError) as caught:
        call(*arguments)
    assert str(arguments[0]) in caught.value.explain()
    return caught.value.code


def test_the_round_trip_of_states_keeps_memory_and_progress(bench):
    app, suspender = bench.start(), bench.suspender
    before = app.checksum()
    assert suspender.state(app.pid) == "running"
    suspender.lock(app.pid, 20_000)
    assert suspender.state(app.pid) == "locked"
    suspender.checkpoint(app.pid)
    assert suspender.state(app.pid) == "checkpointed"
    suspender.prepare()
    suspender.restore(app.pid, {})
    assert suspender.state(app.pid) == "locked"
    suspender.unlock(app.pid)
    assert suspender.state(app.pid) == "running"
    app.wait_for_steps(3)
    assert app.checksum() == before
    steps = app.steps()
    assert steps == list(range(1, len(steps) + 1))


def test_no_gpu_work_runs_while_locked_or_checkpointed(bench):
    app, suspender = bench.start(), bench.suspender
    suspender.lock(app.pid, 20_000)
    time.sleep(0.3)
    steps = app.steps()
    time.sleep(0.3)
    suspender.checkpoint(app.pid)
    assert app.steps() == steps
    suspender.restore(app.pid, {})
    suspender.unlock(app.pid)
    app.wait_for_steps(1)


def test_a_second_round_works_too(bench):
    app, suspender = bench.start(), bench.suspender
    before = app.checksum()
    for _round in range(2):
        suspender.lock(app.pid, 20_000)
        suspender.checkpoint(app.pid)
        suspender.restore(app.pid, {})
        suspender.unlock(app.pid)
    assert app.checksum() == before


def test_wrong_states_are_refused_and_change_nothing(bench):
    app, suspender = bench.start(), bench.suspender
    assert code_of(suspender.checkpoint, app.pid) == 401
    assert code_of(suspender.restore, app.pid, {}) == 401
    assert code_of(suspender.unlock, app.pid) == 401
    assert suspender.state(app.pid) == "running"
    suspender.lock(app.pid, 20_000)
    assert code_of(suspender.lock, app.pid, 1000) == 401
    assert code_of(suspender.restore, app.pid, {}) == 401
    assert suspender.state(app.pid) == "locked"
    suspender.unlock(app.pid)
    app.wait_for_steps(1)


def test_a_lock_that_times_out_leaves_the_process_running(bench):
    app, suspender = bench.start(busy_seconds=3.0), bench.suspender
    time.sleep(0.3)
    begin = time.monotonic()
    with pytest.raises(DriverError) as caught:
        suspender.lock(app.pid, 1000)
    assert caught.value.code == 600
    assert "the job's own GPU work did not finish within 1 s" in caught.value.explain()
    assert 0.9 < time.monotonic() - begin < 3.0
    assert suspender.state(app.pid) == "running"
    app.wait_for_steps(1)


def test_a_lock_waits_for_the_kernel_that_runs_and_others_can_work_meanwhile(bench):
    app, suspender = bench.start(busy_seconds=2.0), bench.suspender
    time.sleep(0.3)
    locker = threading.Thread(target=suspender.lock, args=(app.pid, 30_000))
    locker.start()
    turns = 0
    while locker.is_alive():
        turns += 1
        time.sleep(0.01)
    assert turns > 10, "the call held the GIL"
    assert suspender.state(app.pid) == "locked"
    suspender.unlock(app.pid)


def test_the_restore_thread_is_a_thread_of_the_process(bench):
    app = bench.start()
    tid = bench.suspender.restore_tid(app.pid)
    assert tid is not None
    assert Path(f"/proc/{app.pid}/task/{tid}/comm").read_text().startswith("cuda")


def test_a_process_without_cuda_has_no_restore_thread(bench):
    process = subprocess.Popen(["sleep", "60"])
    try:
        assert bench.suspender.restore_tid(process.pid) is None
    finally:
        process.kill()
        process.wait(10)


def test_a_pid_that_does_not_exist_is_an_error_and_not_a_process_without_cuda(bench):
    process = subprocess.Popen(["true"])
    process.wait(10)
    assert code_of(bench.suspender.restore_tid, process.pid) == 304
    assert code_of(bench.suspender.state, process.pid) == 304


def test_a_zombie_is_a_process_without_cuda(bench):
    app = bench.start()
    app.is_reaped = False
    os.kill(app.pid, signal.SIGKILL)
    end = time.monotonic() + 20
    # The first thread can be a zombie while others still end, the restore thread among them.
    while (
        Path(f"/proc/{app.pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
        or len(list(Path(f"/proc/{app.pid}/task").iterdir())) > 1
    ):
        assert time.monotonic() < end
        time.sleep(0.05)
    assert bench.suspender.restore_tid(app.pid) is None
    assert code_of(bench.suspender.state, app.pid) == 3


def test_a_stopped_process_tells_its_restore_thread_and_nothing_else(bench):
    app, suspender, answers = bench.start(), bench.suspender, []
    tid = suspender.restore_tid(app.pid)
    os.kill(app.pid, signal.SIGSTOP)
    time.sleep(0.3)
    assert suspender.restore_tid(app.pid) == tid
    asker = threading.Thread(target=lambda: answers.append(suspender.state(app.pid)), daemon=True)
    asker.start()
    asker.join(1.5)
    assert asker.is_alive()
    os.kill(app.pid, signal.SIGCONT)
    asker.join(20)
    assert answers == ["running"]


def test_gpu_memory_is_given_back_while_checkpointed(bench):
    app, suspender, nvidia = bench.start(), bench.suspender, Nvidia()
    uses = nvidia.uses([app.pid])
    if not uses and isinstance(bench, GpuBench):
        pytest.skip("NVML counts other pids here (a pid namespace)")
    assert [use.pid for use in uses] == [app.pid]
    suspender.lock(app.pid, 20_000)
    suspender.checkpoint(app.pid)
    assert nvidia.uses([app.pid]) == ()
    suspender.restore(app.pid, {})
    suspender.unlock(app.pid)
    assert [use.gpu_uuid for use in nvidia.uses([app.pid])] == [use.gpu_uuid for use in uses]


def test_a_restore_without_free_memory_is_final(bench):
    # https://github.com/NVIDIA/cuda-checkpoint/issues/44
    app, suspender = bench.start(), bench.suspender
    suspender.lock(app.pid, 20_000)
    suspender.checkpoint(app.pid)
    with bench.full_gpu(), pytest.raises(DriverError) as caught:
        suspender.restore(app.pid, {})
    assert caught.value.code == 2
    assert caught.value.final
    assert "can only be killed and restored from its image" in caught.value.explain()
    assert suspender.state(app.pid) == "checkpointed"
    assert code_of(suspender.restore, app.pid, {}) == 304
    assert code_of(suspender.unlock, app.pid) == 401


def test_a_restore_onto_the_same_gpus_by_a_full_map(bench):
    app, suspender = bench.start(), bench.suspender
    before = app.checksum()
    uuids = [gpu.uuid for gpu in Nvidia().driver().gpus]
    suspender.lock(app.pid, 20_000)
    suspender.checkpoint(app.pid)
    suspender.restore(app.pid, {uuid: uuid for uuid in uuids})
    suspender.unlock(app.pid)
    assert app.checksum() == before


def test_a_map_with_a_foreign_gpu_is_refused_without_harm(bench):
    app, suspender = bench.start(), bench.suspender
    suspender.lock(app.pid, 20_000)
    suspender.checkpoint(app.pid)
    foreign = "GPU-00000000-1111-2222-3333-444444444444"
    assert code_of(suspender.restore, app.pid, {foreign: foreign}) == 1
    assert suspender.state(app.pid) == "checkpointed"
    suspender.restore(app.pid, {})
    suspender.unlock(app.pid)
    app.wait_for_steps(1)

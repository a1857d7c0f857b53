"""Ctrl-C at each of the CUDA steps, over the fake driver: the job goes on, or nothing of it is left."""

from __future__ import annotations

import os
import signal

import pytest

from tests import harness
from tests.faults import arena
from tests.harness import gpuckpt

pytestmark = pytest.mark.criu

GPU_BYTES = 8 << 30
SIGINT_STATUS = 128 + signal.SIGINT


@pytest.fixture
def app(fake_gpu, start_fake_cuda_app):
    fake_gpu.configure(total=GPU_BYTES)
    started = start_fake_cuda_app("--mib", "16")
    started.wait_for_steps(3)
    return started


def shot_at(act, fake_gpu, *arguments):
    """A gpuckpt whose group gets SIGINT, as from a terminal, once its journal has come to `act`; its answer."""
    shot = arena.Shot(*arguments, "--settle", 0.2, env=fake_gpu.variables, start_new_session=True)
    assert shot.until(lambda: arena.journal_has(shot.main.pid, act)), f"the journal never said {act}"
    os.killpg(shot.main.pid, signal.SIGINT)
    return shot.answer()


def acts(fake_gpu):
    return [action for action, _ in fake_gpu.calls() if action in ("lock", "checkpoint", "restore", "unlock")]


@pytest.mark.parametrize("leave_running", [False, True], ids=["ending", "leave-running"])
@pytest.mark.parametrize(
    ("act", "slow", "driver"),
    [
        ("lock", {"fault": "lock=hang:1"}, ["lock", "unlock"]),
        ("checkpoint", {"copy_ms": 1000}, ["lock", "checkpoint", "restore", "unlock"]),
        ("criu-started", {}, ["lock", "checkpoint", "restore", "unlock"]),
    ],
)
def test_a_dump_goes_no_further(work, fake_gpu, app, act, slow, driver, leave_running):
    """What the driver has begun it finishes; after that nothing is begun that would only be undone."""
    before = app.checksum()
    fake_gpu.fail(*([slow["fault"]] if "fault" in slow else []))
    fake_gpu.configure(copy_ms=slow.get("copy_ms", 0))
    more = ["--leave-running"] if leave_running else []
    answer = shot_at(act, fake_gpu, "dump", "--tree", app.pid, work / "img", *more)
    assert (answer.status, answer.report["process"]) == (SIGINT_STATUS, "running"), answer
    assert "SIGINT came; the tree runs on" in answer.error["message"]
    assert acts(fake_gpu) == driver
    assert ('"capture"' in answer.stderr) == (act == "criu-started")
    assert not list(work.glob("img*"))
    assert not arena.runs_of(app.pid)
    app.wait_for_steps(3)
    assert app.checksum() == before
    harness.assert_gapless(app.log)
    harness.assert_gapless(app.log.with_name(f"{app.log.name}.t0"))


def dumped(work, fake_gpu, app):
    answer = gpuckpt("dump", "--tree", app.pid, work / "img", env=fake_gpu.variables)
    assert answer.status == 0, answer
    app.process.wait(10)


def test_a_restore_that_is_in_its_last_step_says_that_it_was_too_late(work, fake_gpu, app):
    """What is copied back to the GPU cannot be stopped: the tree is whole then, and stays."""
    before = app.checksum()
    dumped(work, fake_gpu, app)
    fake_gpu.configure(copy_ms=1000)
    answer = shot_at("cuda-restore", fake_gpu, "restore", work / "img")
    assert (answer.status, answer.report["process"]) == (SIGINT_STATUS, "restored"), answer
    assert f"process {app.pid} is restored and runs" in answer.error["message"]
    assert not arena.runs_of(app.pid)
    app.wait_for_steps(3)
    assert app.checksum() == before

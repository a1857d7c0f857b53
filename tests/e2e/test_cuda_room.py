"""No room for the GPU's memory, there or in the job's cgroup, over the fake driver: refused, waited for, held; never lost.

That a restore is refused beforehand, and that a job whose GPU memory stays taken is held: test_cuda.py.
"""

from __future__ import annotations

import signal
import subprocess
import time

import pytest

from tests import harness, memory_cgroups
from tests.faults import arena
from tests.harness import gpuckpt

pytestmark = pytest.mark.criu

GPU_BYTES = 8 << 30
TAKEN_BYTES = GPU_BYTES - (4 << 20)
SHORTAGE = "GPU 0 has 0.0 GiB free"


@pytest.fixture
def app(fake_gpu, start_fake_cuda_app):
    fake_gpu.configure(total=GPU_BYTES)
    started = start_fake_cuda_app("--mib", "16")
    started.wait_for_steps(3)
    return started


@pytest.fixture
def small_disk(work):
    """A file system of 160 MiB for images, which has no other room."""
    place = work / "disk"
    place.mkdir(mode=0o700)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=160m,mode=0700", "none", place], check=True, timeout=10)
    yield place
    subprocess.run(["umount", place], check=True, timeout=10)


def test_the_copy_of_the_gpu_memory_counts_once(small_disk, fake_gpu, start_fake_cuda_app):
    """Room for the job and its 96 MiB on the GPU; while it stands still its own memory holds these too."""
    fake_gpu.configure(total=GPU_BYTES)
    app = start_fake_cuda_app("--mib", "96")
    app.wait_for_steps(3)
    answer = gpuckpt("dump", "--tree", app.pid, small_disk / "img", env=fake_gpu.variables)
    assert (answer.status, answer.report["process"]) == (0, "ended"), answer
    assert [one["verdict"] for one in answer.report["findings"] if one["id"] == "disk-space"] == ["pass"]


def test_a_job_goes_on_by_itself_when_the_memory_is_free_again(work, fake_gpu, app):
    """--leave-running, and somebody had the memory for a while: gpuckpt waits for it."""
    before = app.checksum()
    fake_gpu.configure(copy_ms=500)
    shot = arena.Shot("dump", "--tree", app.pid, work / "img", "--leave-running", env=fake_gpu.variables)
    assert shot.until(lambda: arena.journal_has(shot.main.pid, "checkpoint"))
    fake_gpu.configure(others_0=TAKEN_BYTES)
    assert shot.until(lambda: arena.journal_has(shot.main.pid, "unwind"))
    assert not shot.until_seconds(2.0, since=time.monotonic()) or not arena.journal_has(shot.main.pid, "cuda-restore")
    fake_gpu.configure(others_0=0)
    answer = shot.answer()
    assert (answer.status, answer.report["process"]) == (0, "running"), answer
    app.wait_for_steps(3)
    assert app.checksum() == before
    harness.assert_gapless(app.log)


def restore_that_finds_no_room(fake_gpu, app, image, *options):
    """A restore whose checks have passed when somebody takes the memory; it waits for room."""
    dumped = gpuckpt("dump", "--tree", app.pid, image, env=fake_gpu.variables)
    assert dumped.status == 0, dumped
    app.process.wait(10)
    shot = arena.Shot("restore", image, *options, env=fake_gpu.variables)
    assert shot.until(lambda: arena.journal_has(shot.main.pid, "criu-started"))
    fake_gpu.configure(others_0=TAKEN_BYTES)
    return shot


def assert_nothing_is_left(app):
    harness.wait_for(lambda: not harness.alive(app.pid), "the half-built tree has ended")
    assert not arena.runs_of(app.pid)


def assert_restores(fake_gpu, app, image, before):
    fake_gpu.configure(others_0=0)
    harness.wait_for(lambda: not harness.state(app.pid), "its zombie is reaped")
    restored = gpuckpt("restore", image, "--settle", 0.2, env=fake_gpu.variables)
    assert (restored.status, restored.report["process"]) == (0, "restored"), restored
    app.wait_for_steps(3)
    assert app.checksum() == before
    harness.assert_gapless(app.log)


def test_a_restore_that_finds_no_room_any_more_leaves_nothing_and_says_why(work, fake_gpu, app):
    before = app.checksum()
    shot = restore_that_finds_no_room(fake_gpu, app, work / "img", "--timeout", 8)
    answer = shot.answer()
    assert (answer.status, answer.report["process"]) == (40, "untouched"), answer
    assert SHORTAGE in answer.error["message"]
    assert "restore" not in [action for action, _ in fake_gpu.calls()]
    assert_nothing_is_left(app)
    assert_restores(fake_gpu, app, work / "img", before)


def test_a_restore_waits_for_room(work, fake_gpu, app):
    before = app.checksum()
    shot = restore_that_finds_no_room(fake_gpu, app, work / "img", "--settle", 0.2)
    assert shot.until_seconds(3.0, since=time.monotonic())
    fake_gpu.configure(others_0=0)
    answer = shot.answer()
    assert (answer.status, answer.report["process"]) == (0, "restored"), answer
    app.wait_for_steps(3)
    assert app.checksum() == before


def test_a_restore_that_waits_for_room_can_be_broken_off(work, fake_gpu, app):
    before = app.checksum()
    shot = restore_that_finds_no_room(fake_gpu, app, work / "img")
    assert shot.until_seconds(3.0, since=time.monotonic())
    shot.main.send_signal(signal.SIGINT)
    pressed = time.monotonic()
    answer = shot.answer()
    assert time.monotonic() - pressed < 10
    assert (answer.status, answer.report["process"]) == (128 + signal.SIGINT, "untouched"), answer
    assert_nothing_is_left(app)
    assert_restores(fake_gpu, app, work / "img", before)


def test_a_cgroup_too_small_for_the_copy_is_named_before_anything_is_touched(work, fake_gpu, app):
    """The driver copies into the job's own memory, and the kernel would end it for that."""
    with memory_cgroups.limited(200 << 20) as cgroup:
        if cgroup is None:
            pytest.skip("no memory cgroup can be made here")
        (cgroup / "cgroup.procs").write_text(str(app.pid))
        try:
            refused = gpuckpt("dump", "--tree", app.pid, work / "img", env=fake_gpu.variables)
            assert (refused.status, refused.report["process"]) == (20, "untouched"), refused
            room = next(one for one in refused.report["findings"] if one["id"] == "gpu-copy-room")
            assert room["verdict"] == "fail"
            assert f"cgroup {cgroup} has " in room["found"]
            assert "272 MiB" in room["expected"]
            assert "lock" not in [action for action, _ in fake_gpu.calls()]
            app.wait_for_steps(3)
        finally:
            app.stop()

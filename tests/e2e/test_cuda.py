"""The main job with a GPU, over the fake driver: suspended, dumped, ended, restored, resumed.

The fake's restore thread is a real thread of the program that must be able to run while every other is
held, so these tests fail when the hold stops it, or lets another thread run.
"""

from __future__ import annotations

import json
import os
import re
import signal
import stat
from pathlib import Path

import pytest

from gpuckpt.system import hostsettings
from tests import harness
from tests.harness import gpuckpt

pytestmark = pytest.mark.criu


@pytest.fixture
def app(fake_gpu, start_fake_cuda_app):
    fake_gpu.configure(total=8 << 30)
    started = start_fake_cuda_app("--mib", "16")
    started.wait_for_steps(3)
    return started


def assert_counted(seen):
    """No number is missing, none stands twice."""
    assert seen == list(range(seen[0], seen[0] + len(seen)))


@pytest.mark.parametrize("interface", ["api", "program"])
def test_a_gpu_program_goes_on_with_its_gpu_memory(work, jobs, fake_gpu, app, interface):
    option = ["--use-cuda-program"] if interface == "program" else []
    before = app.checksum()
    dumped = gpuckpt("dump", "--tree", app.pid, work / "img", *option, env=fake_gpu.variables)
    assert (dumped.status, dumped.report["process"]) == (0, "ended"), dumped
    assert {"lock", "gpu_to_host", "capture", "publish"} <= set(dumped.report["data"]["seconds"])
    app.process.wait(10)
    assert fake_gpu.used_bytes() == 0
    counts = app.thread_counts()
    restored = gpuckpt("restore", work / "img", "--settle", 0.3, *option, env=fake_gpu.variables)
    assert (restored.status, restored.report["process"]) == (0, "restored"), restored
    app.wait_for_steps(3)
    assert app.checksum() == before
    assert_counted(app.steps())
    now = app.thread_counts()
    assert now[: len(counts)] == counts
    assert_counted(now)
    assert [action for action, _ in fake_gpu.calls() if action in ("lock", "checkpoint", "restore", "unlock")] == [
        "lock",
        "checkpoint",
        "restore",
        "unlock",
    ]


def test_no_instruction_runs_between_the_cut_and_the_image(work, fake_gpu, app):
    """The plain thread's count in its log is the count in its memory: it must be the same after the restore."""
    dumped = gpuckpt(
        "dump", "--tree", app.pid, work / "img", "--leave-running", "--settle", 0.2, env=fake_gpu.variables
    )
    assert (dumped.status, dumped.report["process"]) == (0, "running"), dumped
    app.wait_for_steps(3)
    assert_counted(app.thread_counts())
    manifest = json.loads((work / "img" / "manifest.json").read_text())
    assert manifest["cuda"][0]["gpu_memory_bytes"] == {manifest["host"]["gpu"]["gpus"][0]["uuid"]: 16 << 20}
    assert manifest["handed_over_stopped"] is True


@pytest.mark.parametrize("fault", ["lock=600", "checkpoint=2", "checkpoint=999"])
def test_a_driver_that_refuses_leaves_the_job_running(work, fake_gpu, app, fault):
    fake_gpu.fail(fault)
    dumped = gpuckpt("dump", "--tree", app.pid, work / "img", env=fake_gpu.variables)
    assert (dumped.status, dumped.report["process"]) == (30, "running"), dumped
    assert f"process {app.pid}" in dumped.error["message"]
    assert not list(work.glob("img*"))
    fake_gpu.fail()
    app.wait_for_steps(3)


def test_a_restore_into_a_full_gpu_is_refused_and_works_once_there_is_room(work, fake_gpu, app):
    before = app.checksum()
    assert gpuckpt("dump", "--tree", app.pid, work / "img", env=fake_gpu.variables).status == 0
    app.process.wait(10)
    fake_gpu.configure(others_0=(8 << 30) - (4 << 20))
    refused = gpuckpt("restore", work / "img", env=fake_gpu.variables)
    assert refused.status == 20, refused
    assert "gpu-memory" in refused.finding_ids
    assert not harness.alive(app.pid)
    fake_gpu.configure(others_0=0)
    assert gpuckpt("restore", work / "img", "--settle", 0.3, env=fake_gpu.variables).status == 0
    assert app.checksum() == before


def journal_act(act, main):
    """The directory of this gpuckpt's run, once its journal has come to `act`."""
    for journal in Path("/run/gpuckpt/runs").glob("*/journal"):
        try:
            card = json.loads((journal.parent / "run.json").read_text())
            if card["pid"] == main.pid and f'"act": "{act}"' in journal.read_text(errors="replace"):
                return journal.parent
        except (OSError, ValueError):
            continue
    return None


def owner_of(main_pid):
    """The owner is the child of the gpuckpt process that runs gpuckpt.owner.process."""
    children = Path(f"/proc/{main_pid}/task/{main_pid}/children").read_text().split()
    return next(int(pid) for pid in children if b"gpuckpt.owner.process" in Path(f"/proc/{pid}/cmdline").read_bytes())


def start_slow_dump(fake_gpu, app, image, act, copy_ms=3000):
    """A dump that stays in the CUDA checkpoint long enough to be killed there."""
    fake_gpu.configure(copy_ms=copy_ms)
    run = harness.start_gpuckpt("dump", "--tree", app.pid, image, "--settle", 0.2, env=fake_gpu.variables)
    harness.wait_for(lambda: journal_act(act, run), f"the journal says {act}")
    return run


def test_the_pages_of_the_copy_are_there_before_the_driver_comes_to_them(work, fake_gpu, start_fake_cuda_app):
    """The fake driver maps its copy, sleeps, and fills it."""
    fake_gpu.configure(total=8 << 30)
    app = start_fake_cuda_app("--mib", "256")
    app.wait_for_steps(1)
    before = app.checksum()
    harness.wait_for(lambda: harness.resident(app.pid) < 200 << 20, "what the digest needed is free again")
    run = start_slow_dump(fake_gpu, app, work / "img", "checkpoint", copy_ms=4000)
    harness.wait_for(lambda: harness.resident(app.pid) >= 256 << 20, "the pages are there")
    assert fake_gpu.used_bytes() == 256 << 20, "and the driver has not come to them"
    assert run.wait(60) == 0
    run.communicate()
    app.process.wait(10)
    assert gpuckpt("restore", work / "img", "--settle", 0.3, env=fake_gpu.variables).status == 0
    assert app.checksum() == before


def test_the_copy_that_the_driver_reads_has_huge_pages_and_nothing_else_has(work, fake_gpu, start_fake_cuda_app):
    """Where the kernel gives them if asked: the copy is known from the dump, and the driver unmaps it again."""
    if not hostsettings.gives_huge_pages_if_asked():
        pytest.skip("transparent huge pages are not `madvise` here")
    fake_gpu.configure(total=8 << 30)
    app = start_fake_cuda_app("--mib", "256")
    app.wait_for_steps(1)
    before = app.checksum()
    assert gpuckpt("dump", "--tree", app.pid, work / "img", env=fake_gpu.variables).status == 0
    app.process.wait(10)
    [one] = json.loads((work / "img" / "manifest.json").read_text())["cuda"]
    [(start, end)] = one["host_copies"]
    assert end - start == 256 << 20
    fake_gpu.fail("restore=hang:4")
    run = harness.start_gpuckpt("restore", work / "img", env=fake_gpu.variables)
    harness.wait_for(lambda: journal_act("cuda-restore", run), "the driver is at work")
    maps = Path(f"/proc/{app.pid}/smaps").read_text()
    assert run.wait(60) == 0
    run.communicate()
    assert app.checksum() == before
    advised = {}
    for area in re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", maps):
        if " hg " in area:
            first, last = (int(number, 16) for number in area.split()[0].split("-"))
            advised[first, last] = int(re.search(r"AnonHugePages: *([0-9]+)", area)[1]) << 10
    assert advised.keys() == {(start, end)}
    assert advised[start, end] >= 250 << 20
    assert " hg " not in Path(f"/proc/{app.pid}/smaps").read_text(), "the program's own memory is as it was"


@pytest.mark.parametrize("act", ["lock", "checkpoint"])
def test_main_killed_in_the_suspension_leaves_the_job_running(work, fake_gpu, app, act):
    if act == "lock":
        fake_gpu.fail("lock=hang:1")
    before = app.checksum()
    run = start_slow_dump(fake_gpu, app, work / "img", act, copy_ms=1000)
    run.kill()
    run.communicate(timeout=10)  # closes its pipes
    harness.wait_for(lambda: not journal_act(act, run), "the owner has ended and cleaned up")
    app.wait_for_steps(3)
    assert app.checksum() == before
    assert_counted(app.thread_counts())


def test_owner_killed_in_the_cuda_checkpoint_main_brings_the_job_back(work, fake_gpu, app):
    before = app.checksum()
    run = start_slow_dump(fake_gpu, app, work / "img", "checkpoint", copy_ms=1000)
    os.kill(owner_of(run.pid), signal.SIGKILL)
    stdout, _ = run.communicate(timeout=100)
    report = json.loads(stdout)
    assert (run.returncode, report["process"]) == (30, "running"), report
    app.wait_for_steps(3)
    assert app.checksum() == before
    assert_counted(app.thread_counts())


@pytest.mark.parametrize("act", ["checkpoint", "at-gate"])
def test_both_killed_restore_tree_repairs(work, fake_gpu, app, act):
    """Neither survivor is left: the journal lets `restore --tree` bring the job back."""
    before = app.checksum()
    run = start_slow_dump(fake_gpu, app, work / "img", act, copy_ms=500)
    owner = owner_of(run.pid)
    os.kill(run.pid, signal.SIGKILL)
    os.kill(owner, signal.SIGKILL)
    run.communicate(timeout=10)  # closes its pipes
    seen = gpuckpt("inspect", "--tree", app.pid, env=fake_gpu.variables)
    assert seen.report["data"]["interrupted"]["operation"] == "dump"
    refused = gpuckpt("dump", "--tree", app.pid, work / "img2", env=fake_gpu.variables)
    assert refused.status in (20, 22), refused
    repaired = gpuckpt("restore", "--tree", app.pid, env=fake_gpu.variables)
    assert (repaired.status, repaired.report["process"]) == (0, "running"), repaired
    app.wait_for_steps(3)
    assert app.checksum() == before
    assert_counted(app.thread_counts())


def test_memory_taken_while_suspended_holds_the_tree_and_publishes_the_image(work, fake_gpu, app):
    """--leave-running: the resume finds no room. Held (31), never lost; the image is good; repair works."""
    before = app.checksum()
    fake_gpu.configure(copy_ms=1500)
    run = harness.start_gpuckpt(
        "dump", "--tree", app.pid, work / "img", "--leave-running", "--timeout", 20, env=fake_gpu.variables
    )
    harness.wait_for(lambda: journal_act("checkpoint", run), "the checkpoint has begun")
    fake_gpu.configure(others_0=(8 << 30) - (4 << 20))
    stdout, _ = run.communicate(timeout=100)
    report = json.loads(stdout)
    assert (run.returncode, report["process"]) == (31, "frozen"), report
    assert "GPU 0" in report["error"]["message"]
    assert f"restore --tree {app.pid}" in report["error"]["hint"]
    assert (work / "img" / "manifest.json").exists()
    fake_gpu.configure(others_0=0)
    repaired = gpuckpt("restore", "--tree", app.pid, env=fake_gpu.variables)
    assert (repaired.status, repaired.report["process"]) == (0, "running"), repaired
    app.wait_for_steps(3)
    assert app.checksum() == before


def test_main_killed_in_the_cuda_restore_leaves_a_whole_tree_or_none(work, fake_gpu, app):
    before = app.checksum()
    assert gpuckpt("dump", "--tree", app.pid, work / "img", env=fake_gpu.variables).status == 0
    app.process.wait(10)
    fake_gpu.configure(copy_ms=1000)
    run = harness.start_gpuckpt("restore", work / "img", env=fake_gpu.variables)
    harness.wait_for(lambda: journal_act("cuda-restore", run), "the CUDA restore has begun")
    run.kill()
    run.communicate(timeout=10)  # closes its pipes
    harness.wait_for(lambda: not journal_act("cuda-restore", run), "the owner has ended")
    app.wait_for_steps(3)
    assert app.checksum() == before


def test_owner_killed_in_the_cuda_restore_leaves_nothing(work, fake_gpu, app):
    """EXITKILL: the half-built tree ends with its holder, and the image restores afterwards."""
    before = app.checksum()
    assert gpuckpt("dump", "--tree", app.pid, work / "img", env=fake_gpu.variables).status == 0
    app.process.wait(10)
    counts = app.thread_counts()
    fake_gpu.configure(copy_ms=1500)
    run = harness.start_gpuckpt("restore", work / "img", env=fake_gpu.variables)
    harness.wait_for(lambda: journal_act("cuda-restore", run), "the CUDA restore has begun")
    os.kill(owner_of(run.pid), signal.SIGKILL)
    stdout, _ = run.communicate(timeout=100)
    assert (run.returncode, json.loads(stdout)["outcome"]) == (40, "failed"), stdout
    harness.wait_for(lambda: not harness.alive(app.pid), "the half-built tree has ended")
    assert app.thread_counts() == counts
    fake_gpu.configure(copy_ms=0)
    harness.wait_for(lambda: not Path(f"/proc/{app.pid}").exists(), "its zombie is reaped")
    assert gpuckpt("restore", work / "img", "--settle", 0.3, env=fake_gpu.variables).status == 0
    assert app.checksum() == before


def test_a_child_that_inherited_gpu_files_is_named(work, fake_gpu, start_fake_cuda_app):
    """fork after CUDA: the child keeps the device files without a context of its own."""
    fake_gpu.configure(total=8 << 30)
    device = Path("/dev/nvidia-gpuckpt-test")
    os.mknod(device, stat.S_IFCHR | 0o600, os.makedev(1, 3))
    try:
        app = start_fake_cuda_app("--mib", "8", "--fork", "1", "--device", str(device))
        refused = gpuckpt("dump", "--tree", app.pid, work / "img", env=fake_gpu.variables)
    finally:
        device.unlink()
    assert refused.status == 20, refused
    assert "gpu-files" in refused.finding_ids
    app.wait_for_steps(2)


def test_two_cuda_processes_are_suspended_together(work, fake_gpu, start_fake_cuda_app):
    fake_gpu.configure(total=8 << 30)
    app = start_fake_cuda_app("--mib", "8", "--children", "1")
    dumped = gpuckpt("dump", "--tree", app.pid, work / "img", env=fake_gpu.variables)
    assert dumped.status == 0, dumped
    app.process.wait(10)
    acts = [action for action, _ in fake_gpu.calls() if action in ("lock", "checkpoint")]
    assert acts == ["lock", "lock", "checkpoint", "checkpoint"]
    restored = gpuckpt("restore", work / "img", "--settle", 0.3, env=fake_gpu.variables)
    assert restored.status == 0, restored
    app.wait_for_steps(3)
    assert_counted(app.steps())


def test_an_unreaped_child_does_not_freeze_the_tree(work, fake_gpu, start_fake_cuda_app):
    """A zombie cannot be seized (EPERM, as for a traced thread): it must be left out, not fail hold and unwind."""
    fake_gpu.configure(total=8 << 30)
    app = start_fake_cuda_app("--mib", "8", "--zombie")
    dumped = gpuckpt(
        "dump", "--tree", app.pid, work / "img", "--leave-running", "--settle", 0.2, env=fake_gpu.variables
    )
    assert (dumped.status, dumped.report["process"]) == (0, "running"), dumped
    app.wait_for_steps(3)


def test_a_main_that_was_stopped_does_not_keep_the_job_at_the_gate(work, fake_gpu, app):
    """SIGSTOP of gpuckpt in the middle of a dump: after some silence its owner ends it, and the job goes on."""
    before = app.checksum()
    run = harness.start_gpuckpt("dump", "--tree", app.pid, work / "img", env=fake_gpu.variables)
    harness.wait_for(lambda: journal_act("criu-started", run), "CRIU has started")
    os.kill(run.pid, signal.SIGSTOP)
    try:
        app.wait_for_steps(3, timeout=100)
    finally:
        os.kill(run.pid, signal.SIGCONT)
    run.communicate(timeout=60)
    assert run.returncode in (30, -signal.SIGKILL)
    assert app.checksum() == before
    assert_counted(app.thread_counts())
    again = gpuckpt("dump", "--tree", app.pid, work / "img", env=fake_gpu.variables)
    assert again.status == 0, again


def test_a_driver_that_kills_the_job_in_the_lock_is_looked_at(work, fake_gpu, app):
    """Seen with a driver of 2025: the lock fails and the job has died of it. Never called unharmed."""
    fake_gpu.fail("lock=kill")
    answer = gpuckpt("dump", "--tree", app.pid, work / "img", env=fake_gpu.variables)
    assert (answer.status, answer.report["process"]) == (31, "gone"), answer.error
    assert f"{app.pid} gone" in answer.error["message"]
    assert not list(work.glob("img*"))


def test_a_lock_that_returns_too_late_is_undone(work, fake_gpu, app):
    """As of one rank whose peer is locked already: given up after --lock-timeout and some patience, unlocked by looking."""
    fake_gpu.fail("lock=hang:13 call 1")
    answer = gpuckpt("dump", "--tree", app.pid, work / "img", "--lock-timeout", 1, env=fake_gpu.variables)
    assert (answer.status, answer.report["process"]) == (30, "running"), answer.error
    assert not list(work.glob("img*"))
    app.wait_for_steps(2)


def test_a_job_that_is_back_without_its_gpu_is_not_called_healthy(work, fake_gpu, app):
    """CRIU and the driver both say that they did it; the state says something else."""
    assert gpuckpt("dump", "--tree", app.pid, work / "img", env=fake_gpu.variables).status == 0
    app.process.wait(10)
    fake_gpu.fail("unlock=0")
    answer = gpuckpt("restore", work / "img", "--settle", 0.2, env=fake_gpu.variables)
    assert (answer.status, answer.report["process"]) == (41, "restored"), answer.error
    assert "locked" in answer.error["message"]
    fake_gpu.fail()
    repaired = gpuckpt("restore", "--tree", app.pid, env=fake_gpu.variables)
    assert (repaired.status, repaired.report["process"]) == (0, "running"), repaired.error
    app.wait_for_steps(2)

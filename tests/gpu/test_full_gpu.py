"""Another process has the memory of the GPU when a job shall have it back: refused, waited for, held; never lost."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import time

import pytest

from tests import harness
from tests.faults import arena
from tests.gpu.survivor import Shot, assert_unharmed, dump_and_end, gpuckpt, restore, wait_free

pytestmark = [pytest.mark.gpu, pytest.mark.criu]

HARDLY_ANYTHING = 128 << 20
SPARE = 1 << 30
"""What the hog leaves to the driver while the job still has its memory."""
JOB_GONE = SPARE + (768 << 20)
"""More is free than that only when the job's memory has gone."""
WITHIN_SECONDS = 15
SHORTAGE = re.compile(r"GPU \d+ has \d+\.\d GiB free, \d+\.\d GiB are needed; held by ")


@pytest.fixture(autouse=True)
def memory_is_known(survivor):
    """Without it gpuckpt cannot know what a CUDA restore will need, and these tests would lose the job."""
    uses = gpuckpt("inspect", "--tree", survivor.pid).report["data"]["tree"]["gpu_uses"]
    if not any(use["memory_bytes"] for use in uses):
        pytest.fail(f"NVML does not tell the GPU memory of process {survivor.pid} here: {uses}")


@contextlib.contextmanager
def standing_still(pid: int):
    """A gpuckpt that makes no further step of its own for a moment, less than the 30 s its owner bears."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def test_a_restore_into_a_full_gpu_is_refused(survivor, place, record, hog):
    before, image = survivor.checksums(), place / "full"
    dump_and_end(survivor, image)
    hog.ask("leave", HARDLY_ANYTHING)
    left = hog.await_answer("taken", 30)
    refused = gpuckpt("restore", image)
    assert (refused.status, refused.report["process"]) == (20, "untouched"), refused
    room = next(one for one in refused.report["findings"] if one["id"] == "gpu-memory")
    assert room["verdict"] == "fail", room
    assert re.search(r"needs .*, has .* free; held by ", room["found"]), room
    assert not harness.alive(survivor.pid)
    hog.end()
    restore(survivor, image)
    assert_unharmed(survivor, before)
    record(
        "restore into a full GPU (1 GiB): refused, and it restores once there is room",
        outcome="passed",
        free_bytes=left,
        found=room["found"],
        hint=room["hint"],
    )
    shutil.rmtree(image)


def test_a_gpu_that_fills_up_after_the_checks(survivor, place, record, hog):
    """The restore waits until its deadline, says who has the memory, leaves nothing; the image restores afterwards."""
    before, image = survivor.checksums(), place / "filled"
    dump_and_end(survivor, image)
    shot = Shot("restore", image, "--timeout", WITHIN_SECONDS)
    shot.until_act("criu-started")
    with standing_still(shot.main.pid):
        hog.ask("leave", HARDLY_ANYTHING)
        left = hog.await_answer("taken", 20)
    answer = shot.whole_answer()
    assert (answer.status, answer.report["process"]) == (40, "untouched"), answer
    assert SHORTAGE.search(answer.error["message"]), answer
    assert not harness.alive(survivor.pid)
    assert not arena.runs_of(survivor.pid)
    hog.end()
    wait_free(survivor)
    restore(survivor, image)
    assert_unharmed(survivor, before)
    record(
        "the GPU fills up between a restore's checks and its CUDA restore (1 GiB)",
        outcome="passed: 40, nothing left, the image restores afterwards",
        free_bytes=left,
        message=answer.error["message"],
    )
    shutil.rmtree(image)


def taken_while_suspended(survivor, image, hog, *options: object) -> Shot:
    """A dump with --leave-running that goes on when a hog has taken its job's GPU memory, and all the rest."""
    hog.ask("leave", SPARE)
    hog.await_answer("taken", 30)
    shot = Shot("dump", "--tree", survivor.pid, image, "--leave-running", "--settle", 0.2, *options)
    shot.until_act("checkpoint")
    with standing_still(shot.main.pid):
        hog.ask("pounce", JOB_GONE)
        hog.await_answer("taken", 25)
    return shot


def test_a_job_whose_memory_was_taken_is_held_not_lost(survivor, place, record, hog):
    """31, the image is complete, and `restore --tree`, as the message says, brings the job back once there is room."""
    before, image = survivor.checksums(), place / "taken"
    shot = taken_while_suspended(survivor, image, hog, "--timeout", WITHIN_SECONDS)
    answer = shot.whole_answer()
    assert (answer.status, answer.report["process"]) == (31, "frozen"), answer
    assert SHORTAGE.search(answer.error["message"]), answer
    assert f"`gpuckpt restore --tree {survivor.pid}`" in answer.error["hint"], answer
    assert harness.state(survivor.pid) == "T"
    assert (image / "manifest.json").exists()
    hog.end()
    repaired = gpuckpt("restore", "--tree", survivor.pid)
    assert (repaired.status, repaired.report["process"]) == (0, "running"), repaired
    assert_unharmed(survivor, before)
    record(
        "another process takes the GPU memory during `dump --leave-running` (1 GiB) and keeps it",
        outcome="passed: 31, held; it goes on after `gpuckpt restore --tree`",
        message=answer.error["message"],
        hint=answer.error["hint"],
    )
    shutil.rmtree(image)


def test_a_job_whose_memory_was_taken_goes_on_by_itself(survivor, place, record, hog):
    """The memory is free again while gpuckpt waits for it."""
    before, image = survivor.checksums(), place / "given-back"
    shot = taken_while_suspended(survivor, image, hog)
    shot.until_act("unwind")
    assert shot.until_seconds(2.5, since=time.monotonic()), shot.answer()
    assert harness.state(survivor.pid) in "Tt"
    hog.end()
    answer = shot.whole_answer()
    assert (answer.status, answer.report["process"]) == (0, "running"), answer
    assert_unharmed(survivor, before)
    record(
        "another process takes the GPU memory during `dump --leave-running` (1 GiB) and ends 2.5 s later",
        outcome="passed: the job goes on by itself",
        frozen_seconds=answer.report["data"]["frozen_seconds"],
    )
    shutil.rmtree(image)

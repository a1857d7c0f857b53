"""The life of a job that is saved again and again, broken off, limited and moved; all but the last on one process."""

from __future__ import annotations

import os
import shutil
import signal
import statistics
import time
from pathlib import Path

import pytest

from tests import memory_cgroups
from tests.faults import arena
from tests.gpu.survivor import Shot, assert_unharmed, dump_and_end, gpuckpt, restore, wait_free
from tests.harness import Answer

pytestmark = [pytest.mark.gpu, pytest.mark.criu]

DUMPS = int(os.environ.get("GPUCKPT_GPU_DUMPS", "20"))
LIMIT = 512 << 20
SIGINT_STATUS = 128 + signal.SIGINT


def test_a_job_that_is_saved_twenty_times_goes_on(survivor, place, record):
    """--leave-running, each time with the image before as --base, which is removed then."""
    before, steps = survivor.checksums(), survivor.steps()[-1]
    done, walls, base = [], [], None
    for number in range(DUMPS):
        image = place / f"running{number}"
        began = time.monotonic()
        more = ("--base", base) if base else ()
        answer = gpuckpt("dump", "--tree", survivor.pid, image, "--leave-running", "--settle", 0.1, *more)
        walls.append(time.monotonic() - began)
        assert (answer.status, answer.report["process"]) == (0, "running"), (number, answer)
        done.append(answer.report["data"])
        if base:
            shutil.rmtree(base)
        base = image
        survivor.wait_past(survivor.steps()[-1])
    assert_unharmed(survivor, before)
    verified = gpuckpt("inspect", base, "--verify")
    assert verified.status == 0, verified
    frozen = [data["frozen_seconds"] for data in done]
    written = [data["bytes_stored"] - data["bytes_shared"] for data in done]
    record(
        f"PyTorch, 1 GiB, CUDA graph: --leave-running {DUMPS} times in a row, each with --base",
        outcome="passed",
        steps_meanwhile=survivor.steps()[-1] - steps,
        frozen_total=sum(frozen),
        frozen_median=statistics.median(frozen),
        frozen_most=max(frozen),
        wall_median=statistics.median(walls),
        written_first=written[0],
        written_median_of_the_others=statistics.median(written[1:] or written),
    )
    shutil.rmtree(base)


def broken_off_at(act: str, *arguments: object) -> tuple[Answer, float]:
    """A gpuckpt whose group gets SIGINT, as from a terminal, when its journal says `act`; its answer, and seconds."""
    shot = Shot(*arguments, "--settle", 0.2, start_new_session=True)
    shot.until_act(act)
    os.killpg(shot.main.pid, signal.SIGINT)
    pressed = time.monotonic()
    answer = shot.whole_answer()
    return answer, time.monotonic() - pressed


@pytest.mark.parametrize("act", ["lock", "checkpoint", "criu-started", "at-gate"])
def test_ctrl_c_in_a_dump(survivor, place, record, act):
    """130, the job goes on, and nothing is left. At the gate the dump may be past that: then it says what is."""
    before, image = survivor.checksums(), place / "broken-off"
    answer, seconds = broken_off_at(act, "dump", "--tree", survivor.pid, image)
    if act == "at-gate" and answer.status == 0:
        assert answer.report["process"] == "ended", answer
        wait_free(survivor)
        restore(survivor, image)
        shutil.rmtree(image)
    else:
        assert (answer.status, answer.report["process"]) == (SIGINT_STATUS, "running"), answer
        assert "SIGINT came; the tree runs on" in answer.error["message"], answer
    assert_unharmed(survivor, before)
    assert not list(place.glob("broken-off*"))
    assert not arena.runs_of(survivor.pid)
    record(f"Ctrl-C at `{act}` of a dump (1 GiB)", outcome="passed", status=answer.status, seconds_to_the_end=seconds)


def test_ctrl_c_in_the_cuda_restore(survivor, place, record):
    """What is copied back cannot be stopped: 130, and it says that the job is restored and runs."""
    before, image = survivor.checksums(), place / "image"
    dump_and_end(survivor, image)
    answer, seconds = broken_off_at("cuda-restore", "restore", image)
    assert (answer.status, answer.report["process"]) == (SIGINT_STATUS, "restored"), answer
    assert f"process {survivor.pid} is restored and runs" in answer.error["message"], answer
    assert_unharmed(survivor, before)
    assert not arena.runs_of(survivor.pid)
    record(
        "Ctrl-C in the CUDA restore (1 GiB)",
        outcome="passed: it runs, and that is said",
        status=answer.status,
        seconds_to_the_end=seconds,
    )
    shutil.rmtree(image)


def test_a_cgroup_too_small_for_the_copy(survivor, place, record):
    """Refused with the figure before the driver is asked for anything; the kernel would end the job for the copy."""
    before = survivor.checksums()
    with memory_cgroups.limited(LIMIT) as cgroup:
        if cgroup is None:
            pytest.skip(f"no memory cgroup can be made here: {Path('/proc/self/cgroup').read_text().split()}")
        (cgroup / "cgroup.procs").write_text(str(survivor.pid))
        try:
            refused = gpuckpt("dump", "--tree", survivor.pid, place / "refused")
        finally:
            (cgroup.parent / "cgroup.procs").write_text(str(survivor.pid))
    assert (refused.status, refused.report["process"]) == (20, "untouched"), refused
    room = next(one for one in refused.report["findings"] if one["id"] == "gpu-copy-room")
    assert room["verdict"] == "fail", room
    assert f"cgroup {cgroup} has " in room["found"], room
    assert not list(place.glob("refused*"))
    assert_unharmed(survivor, before)
    record("a cgroup limit of 512 MiB, 1 GiB on the GPU", outcome="passed: refused", **_words(room))


def _words(finding: dict) -> dict[str, str]:
    return {name: finding[name] for name in ("expected", "found", "hint")}


def test_a_job_moves_to_the_other_gpu_and_back(torch_job, place, record):
    """Every GPU is named in the map, used or not: the driver takes no other."""
    gpus = gpuckpt("inspect").report["data"]["host"]["gpu"]["gpus"]
    if len(gpus) < 2:
        pytest.skip(f"needs two GPUs, has {len(gpus)}")
    job = torch_job(1.0, "--graph")
    before, seconds = job.checksums(), []
    swapped = [("--gpu", f"{one}={two}") for one, two in ((0, 1), (1, 0), *((n, n) for n in range(2, len(gpus))))]
    for target in (1, 0):
        image = place / f"to{target}"
        dump_and_end_reaped(job, image)
        moved = gpuckpt("restore", image, "--settle", 0.2, *(word for pair in swapped for word in pair))
        assert (moved.status, moved.report["process"]) == (0, "restored"), moved
        seconds.append(moved.report["data"]["seconds"])
        uses = gpuckpt("inspect", "--tree", job.pid).report["data"]["tree"]["gpu_uses"]
        assert {use["gpu_uuid"] for use in uses} == {gpus[target]["uuid"]}, (uses, gpus)
        assert_unharmed(job, before)
        shutil.rmtree(image)
    record("a job (1 GiB) moves from GPU 0 to GPU 1 and back", outcome="passed", restore_seconds=seconds)


def dump_and_end_reaped(job, image: Path) -> None:
    """As dump_and_end, of a job that nobody reaps in the background."""
    answer = gpuckpt("dump", "--tree", job.pid, image)
    assert answer.status == 0, answer
    job.process.poll()
    wait_free(job)

"""kill -9 in the middle of dumps and restores, on one PyTorch process that outlives them all."""

from __future__ import annotations

import shutil
import time

import pytest

from gpuckpt.owner import journal
from tests import harness
from tests.faults import arena
from tests.gpu.survivor import Shot, assert_unharmed, dump_and_end, gpuckpt, restore, wait_free

pytestmark = [pytest.mark.gpu, pytest.mark.criu]

ACTS = ("lock", "checkpoint", "criu-started", "at-gate")
WHO = ("main", "owner", "both")


@pytest.fixture(scope="module")
def table(request):
    """table(words): a line of the table that stands at the end, whatever has failed."""
    lines: list[tuple[str, ...]] = [("killed", "at", "last act", "process after", "exit", "seconds", "the job")]
    yield lambda *words: lines.append(tuple(map(str, words)))
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        print()
        for line in lines:
            print("  ".join(word.ljust(width) for word, width in zip(line, widths, strict=True)).rstrip())


def kill_at(act: str, who: str, *arguments: object) -> tuple[Shot, str]:
    """A gpuckpt of which `who` is killed when its journal says `act`; the act that it had come to by then."""
    shot = Shot(*arguments)
    shot.until_act(act)
    run, owner = arena.run_of_main(shot.main.pid), arena.owner_of(shot.main.pid)
    for pid in {"main": (shot.main.pid,), "owner": (owner,), "both": (shot.main.pid, owner)}[who]:
        assert arena.kill(pid), f"{who} had ended"
    lines = journal.read(run).lines if run is not None else []
    return shot, str(lines[-1]["act"]) if lines else act


@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("who", WHO)
def test_killed_in_a_dump(survivor, place, record, table, who, act):
    """The job goes on, by itself or by `restore --tree`."""
    before, image = survivor.checksums(), place / f"killed-{who}-{act}"
    shot, came_to = kill_at(act, who, "dump", "--tree", survivor.pid, image)
    began = time.monotonic()
    answer = shot.answer()
    state, how = harness.state(survivor.pid), "goes on"
    if act == "at-gate" and image.exists() and not harness.alive(survivor.pid):
        how = "had ended: the kill came after the commit; its image restores"
        wait_free(survivor)
        restore(survivor, image)
    elif who == "owner":
        assert answer is not None, f"no words, status {shot.main.returncode}"
        assert (answer.status, answer.report["process"]) == (30, "running"), answer
    elif who == "both":
        how = "goes on after `restore --tree`"
        repaired = gpuckpt("restore", "--tree", survivor.pid)
        assert (repaired.status, repaired.report["process"]) == (0, "running"), repaired
    assert_unharmed(survivor, before)
    harness.wait_for(lambda: not arena.runs_of(survivor.pid), f"the run is cleared away: {arena.runs_of(survivor.pid)}")
    seconds = time.monotonic() - began
    assert not image.exists() or (image / "manifest.json").exists()
    shutil.rmtree(image, ignore_errors=True)
    shutil.rmtree(image.with_name(f"{image.name}.partial"), ignore_errors=True)
    status = shot.main.returncode
    table(who, act, came_to, state or "gone", status, f"{seconds:.1f}", how)
    record(
        f"kill -9 of {who} at `{act}` of a dump (1 GiB, one process for all)",
        outcome=f"passed: {how}",
        last_act=came_to,
        process_right_after=state or "gone",
        status=status,
        seconds_until_it_ran=seconds,
    )


@pytest.mark.parametrize("who", ["main", "owner"])
def test_killed_in_a_restore(survivor, place, record, table, who):
    """A whole, running tree or none; the image restores afterwards."""
    before, image = survivor.checksums(), place / f"killed-restore-{who}"
    dump_and_end(survivor, image)
    shot, came_to = kill_at("cuda-restore", who, "restore", image, "--settle", 0.2)
    began = time.monotonic()
    answer = shot.answer()
    how, state = "the owner finished: whole and running", harness.state(survivor.pid)
    if who == "owner":
        how = "nothing left, the image restores"
        assert answer is not None, f"no words, status {shot.main.returncode}"
        assert answer.status == 40, answer
        wait_free(survivor)
        restore(survivor, image)
    assert_unharmed(survivor, before)
    harness.wait_for(lambda: not arena.runs_of(survivor.pid), f"the run is cleared away: {arena.runs_of(survivor.pid)}")
    shutil.rmtree(image)
    status, seconds = shot.main.returncode, time.monotonic() - began
    table(who, "cuda-restore", came_to, state or "gone", status, f"{seconds:.1f}", how)
    record(
        f"kill -9 of {who} in the CUDA restore (1 GiB)",
        outcome=f"passed: {how}",
        last_act=came_to,
        process_right_after=state or "gone",
        status=status,
        seconds_until_it_ran=seconds,
    )

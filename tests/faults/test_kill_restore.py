"""kill -9 at any moment of a restore: a whole running tree or none, and the image restores afterwards."""

from __future__ import annotations

import os
import time
from collections import Counter
from pathlib import Path

import pytest

from tests import harness
from tests.faults import arena
from tests.faults.arena import SETTLE, Job, Shot
from tests.harness import gpuckpt

pytestmark = [pytest.mark.criu, pytest.mark.timeout(600)]

ACTS = ("owner-started", "order", "criu", "criu-started", "let-go")
MAIN_KILLS = 8
OWNER_KILLS = 9
BOTH_KILLS = 8
CRIU_KILLS = 5
ALL_KILLS = 4

MARKS = ("Forking task with", "Restoring children", "Restore via sigreturn", "Restored", "post-restore")
"""Lines of CRIU's log, from the first process that it forks to the last moment before the tree is let go."""


class Saved:
    """A job that lies in an image; its log is cut back to that moment before each restore."""

    def __init__(self, job: Job, place: Path) -> None:
        self.job = job
        self.image = place / "img"
        arena.dump_and_wait(job, self.image)
        self.size = job.log.stat().st_size
        shot = Shot("restore", self.image, *SETTLE)
        shot.until(lambda: arena.owner_of(shot.main.pid))
        owner_at = time.monotonic()
        assert shot.answer().status == 0
        self.whole = time.monotonic() - shot.began
        self.with_owner = time.monotonic() - owner_at
        self.forget()

    def forget(self) -> None:
        """End what was restored, as if it had never been."""
        self.job.kill()
        os.truncate(self.job.log, self.size)

    def moments(self, seed: int, count: int, length: float) -> list[float | str]:
        """Acts of the journal, and moments over the whole length."""
        rng = next(arena.rounds(seed, 1))[1]
        drawn: list[float | str] = [rng.uniform(0, 1.1 * length) for _ in range(count - len(ACTS))]
        moments = [*ACTS, *drawn]
        rng.shuffle(moments)
        return moments

    def start(self) -> Shot:
        """Begin a restore."""
        return Shot("restore", self.image, *SETTLE)


def _owner_at(shot: Shot, moment: float | str) -> tuple[int | None, int | None]:
    """Wait for the owner and then for the moment; the owner's and CRIU's pids."""
    owners: list[int] = []
    crius: list[int] = []

    def is_there() -> bool:
        owner = arena.owner_of(shot.main.pid)
        owners.extend([owner] if owner else [])
        return bool(owner)

    shot.until(is_there)
    since = time.monotonic()

    def has_come() -> bool:
        criu = arena.criu_of(owners[-1]) if owners else None
        crius.extend([criu] if criu else [])
        if isinstance(moment, str):
            return arena.journal_has(shot.main.pid, moment)
        return time.monotonic() - since >= moment

    shot.until(has_come)
    return owners[-1] if owners else None, crius[-1] if crius else None


def _assert_whole_or_none(saved: Saved, counts: Counter[str]) -> None:
    """Never half a tree; afterwards the image restores."""
    job = saved.job
    arena.wait_quiet(job)
    if job.alive:
        job.assert_goes_on()
        counts["whole"] += 1
    else:
        counts["none"] += 1
    saved.forget()
    arena.restore_and_wait(job, saved.image)
    job.assert_goes_on()
    saved.forget()
    assert not arena.runs_of(*job.pids)


def test_main_is_killed(job, place):
    saved = Saved(job, place)
    counts: Counter[str] = Counter()
    for moment in saved.moments(11, MAIN_KILLS, saved.whole):
        shot = saved.start()
        if isinstance(moment, str):
            shot.until(lambda shot=shot, moment=moment: arena.journal_has(shot.main.pid, moment))
        else:
            shot.until_seconds(moment)
        counts["killed" if arena.kill(shot.main.pid) else "had ended before"] += 1
        shot.answer()
        _assert_whole_or_none(saved, counts)
    print(f"\nmain killed -9 in {MAIN_KILLS} restores of {saved.whole:.2f} s: {dict(counts)}")
    assert counts["killed"] >= len(ACTS)


def test_the_owner_is_killed(job, place):
    """Main says what is: restored, or failed and nothing left."""
    saved = Saved(job, place)
    counts: Counter[str] = Counter()
    for moment in saved.moments(12, OWNER_KILLS, saved.with_owner):
        shot = saved.start()
        owner, _ = _owner_at(shot, moment)
        counts["killed" if arena.kill(owner) else "had ended before"] += 1
        _assert_truthful(shot, saved, counts)
        _assert_whole_or_none(saved, counts)
    print(f"\nowner killed -9 in {OWNER_KILLS} restores: {dict(counts)}")
    assert counts["killed"] >= 3


def test_main_and_owner_are_killed(job, place):
    """CRIU finds nobody at its gate and ends what it built, or has let it go as a whole."""
    saved = Saved(job, place)
    counts: Counter[str] = Counter()
    for moment in saved.moments(13, BOTH_KILLS, saved.with_owner):
        shot = saved.start()
        owner, _ = _owner_at(shot, moment)
        counts[f"killed {arena.kill(shot.main.pid) + arena.kill(owner)} of 2"] += 1
        shot.answer()
        _assert_whole_or_none(saved, counts)
    print(f"\nmain and owner killed -9 in {BOTH_KILLS} restores: {dict(counts)}")
    assert counts["killed 2 of 2"] >= 3


def test_criu_is_killed(job, place):
    """What it built by half is ended, at whatever point it was."""
    saved = Saved(job, place)
    counts: Counter[str] = Counter()
    for number, rng in arena.rounds(14, CRIU_KILLS):
        shot = saved.start()
        _, criu = _at_mark(shot, number, rng.uniform(0, 0.02))
        counts["killed" if arena.kill(criu) else "had ended before"] += 1
        _assert_truthful(shot, saved, counts)
        _assert_whole_or_none(saved, counts)
    print(f"\nCRIU killed -9 in {CRIU_KILLS} restores: {dict(counts)}")
    assert counts["killed"] >= 2


def _at_mark(shot: Shot, number: int, more_seconds: float) -> tuple[int | None, int | None]:
    """Wait until CRIU's log says one of MARKS, and a little longer; the owner's and CRIU's pids."""
    log, mark = _criu_log(shot), MARKS[number % len(MARKS)]
    shot.until(lambda: mark in log())
    return _owner_at(shot, more_seconds)


@pytest.mark.parametrize("repairer", ["restore --tree", "the next restore"])
def test_all_three_are_killed(job, place, repairer):
    """Now nobody is left to end a half-built tree: the repair does, or the next restore by itself."""
    saved = Saved(job, place)
    counts: Counter[str] = Counter()
    for number, rng in arena.rounds(15, ALL_KILLS):
        shot = saved.start()
        log = _criu_log(shot)
        # Somewhere between the first process that CRIU forks and the end of its work.
        mark = ("Forking task with", "Restoring children", "Restore via sigreturn", "Restored", "post-restore")[
            number % 5
        ]
        shot.until(lambda log=log, mark=mark: mark in log())
        owner, criu = _owner_at(shot, rng.uniform(0, 0.005))
        for pid in (criu, owner, shot.main.pid):
            arena.kill(pid)
        shot.answer()
        arena.wait_quiet(job)
        left = [pid for pid in job.pids if harness.alive(pid)]
        whole = _runs(job)
        counts["whole" if whole else f"{len(left)} processes half-built"] += 1
        if repairer == "restore --tree" and left and not whole:
            answer = gpuckpt("restore", "--tree", job.root)
            if answer.status == 21:
                # What CRIU has built by half can end by itself, between our look and the repair's.
                assert not [pid for pid in job.pids if harness.alive(pid)], answer.error
            else:
                assert answer.status == 0, (answer.error, answer.stderr)
                assert answer.report["process"] in ("ended", "running")
            assert _runs(job) or not job.alive, job.describe()
        if not _runs(job):
            os.truncate(job.log, saved.size)
            arena.restore_and_wait(job, saved.image)
        job.assert_goes_on()
        saved.forget()
        assert not arena.runs_of(*job.pids)
    print(f"\nmain, owner and CRIU killed -9 in {ALL_KILLS} restores, repaired by {repairer}: {dict(counts)}")


def _runs(job: Job) -> bool:
    """The counter rises: the tree is whole."""
    if len(job.alive) < len(job.pids):
        return False
    before = job.last()
    deadline = time.monotonic() + 1
    while time.monotonic() < deadline:
        if job.last() > before:
            return True
        time.sleep(0.02)
    return False


def _criu_log(shot: Shot):
    def read() -> str:
        directory = arena.run_of_main(shot.main.pid)
        try:
            return (directory / "criu.log").read_text("utf-8", "replace") if directory else ""
        except OSError:
            return ""

    return read


def _assert_truthful(shot: Shot, saved: Saved, counts: Counter[str]) -> None:
    answer = shot.answer()
    counts[f"status {answer.status}"] += 1
    said = (answer.status, answer.report["process"])
    assert said in ((0, "restored"), (40, "untouched")), (answer.error, answer.stderr)
    assert bool(saved.job.alive) == (answer.status == 0), (said, saved.job.describe(), answer.error)

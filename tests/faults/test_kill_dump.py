"""kill -9 at any moment of a dump: the job goes on, or has ended with an image that restores without a gap.

The moments are drawn with a fixed seed over the whole length of an undisturbed dump, and tied to the acts
of the journal and of the image, which are the places where an order of two steps could be wrong.
"""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path

import pytest

from tests.faults import arena
from tests.faults.arena import SETTLE, Job, Shot

pytestmark = [pytest.mark.criu, pytest.mark.timeout(900)]

MAIN_KILLS = 60
OWNER_KILLS = 14
BOTH_KILLS = 12
CRIU_KILLS = 12

JOURNAL_ACTS = ("owner-started", "order", "criu", "criu-started", "at-gate", "committed")


def _image_acts(image: Path) -> dict[str, object]:
    partial = image.with_name(image.name + ".partial")
    return {
        "partial": partial.exists,
        "capturing": lambda: any((partial / "criu").glob("core-*")),
        "manifest": (partial / "manifest.json").exists,
        "published": image.exists,
    }


def _await_act(shot: Shot, act: str, image: Path) -> bool:
    acts = _image_acts(image)
    return shot.until(acts[act] if act in acts else lambda: arena.journal_has(shot.main.pid, act))


def _moments(rng, whole: float, count: int, acts: int) -> list[float | str]:
    """`count` moments, `acts` of them tied to acts."""
    names = (*JOURNAL_ACTS, "partial", "capturing", "manifest", "published")
    tied = [names[number % len(names)] for number in range(acts)]
    drawn = [rng.uniform(0, 1.1 * whole) for _ in range(count - acts)]
    moments = [*tied, *drawn]
    rng.shuffle(moments)
    return moments


def _settle_account(job: Job, image: Path, counts: Counter[str], *, repeats: bool = False) -> None:
    """The promise of the whole tool, looked at after a kill."""
    arena.wait_quiet(job)
    if job.alive:
        job.assert_goes_on(repeats=repeats)
        counts["goes on, image published" if image.exists() else "goes on"] += 1
    else:
        assert image.exists(), f"the job is gone and there is no image: {job.describe()}"
        arena.restore_and_wait(job, image)
        job.assert_goes_on(repeats=repeats)
        counts["ended, image restores"] += 1
    arena.remove_images(image.parent)


def _undisturbed(job: Job, image: Path) -> tuple[float, float]:
    lengths = arena.undisturbed(job, "dump", "--tree", job.root, image, *SETTLE)
    arena.restore_and_wait(job, image)
    arena.remove_images(image.parent)
    return lengths


def test_main_is_killed(job, place):
    image = place / "img"
    whole, _ = _undisturbed(job, image)
    counts: Counter[str] = Counter()
    rng = next(arena.rounds(1, 1))[1]
    for moment in _moments(rng, whole, MAIN_KILLS, acts=20):
        shot = Shot("dump", "--tree", job.root, image, *SETTLE)
        came = _await_act(shot, moment, image) if isinstance(moment, str) else shot.until_seconds(moment)
        counts["killed" if came and arena.kill(shot.main.pid) else "had ended before"] += 1
        answer = shot.answer()
        if answer is not None:  # it came to its words: then nothing that an earlier kill left has stopped it
            assert answer.report["outcome"] == "ok", (answer.error, answer.stderr)
        _settle_account(job, image, counts)
    print(f"\nmain killed -9 in {MAIN_KILLS} dumps of {whole:.2f} s: {dict(counts)}")
    assert counts["killed"] >= 20
    arena.dump_and_wait(job, image)
    arena.restore_and_wait(job, image)
    job.assert_goes_on()
    assert not arena.runs_of(*job.pids)


def test_the_owner_is_killed(job, place):
    """Main sees it, looks with a second owner, and says truthfully what became of the tree."""
    image = place / "img"
    _, with_owner = _undisturbed(job, image)
    counts: Counter[str] = Counter()
    rng = next(arena.rounds(2, 1))[1]
    for moment in _moments(rng, with_owner, OWNER_KILLS, acts=10):
        shot = Shot("dump", "--tree", job.root, image, *SETTLE)
        owner = _owner_at(shot, moment, image)
        counts["killed" if arena.kill(owner) else "had ended before"] += 1
        _assert_truthful(shot.answer(), job, image, counts)
        _settle_account(job, image, counts)
    print(f"\nowner killed -9 in {OWNER_KILLS} dumps: {dict(counts)}")
    assert counts["killed"] >= 5
    assert not arena.runs_of(*job.pids)


def test_main_and_owner_are_killed(job, place):
    """Nobody is left but CRIU, which finds nobody at its gate; the next dump clears what they left."""
    image = place / "img"
    _, with_owner = _undisturbed(job, image)
    counts: Counter[str] = Counter()
    rng = next(arena.rounds(3, 1))[1]
    for moment in _moments(rng, with_owner, BOTH_KILLS, acts=10):
        shot = Shot("dump", "--tree", job.root, image, *SETTLE)
        owner = _owner_at(shot, moment, image)
        killed = arena.kill(shot.main.pid), arena.kill(owner)
        counts[f"killed {sum(killed)} of 2"] += 1
        answer = shot.answer()
        assert answer is None or answer.report["outcome"] == "ok", (answer.error, answer.stderr)
        _settle_account(job, image, counts)
    print(f"\nmain and owner killed -9 in {BOTH_KILLS} dumps: {dict(counts)}")
    assert counts["killed 2 of 2"] >= 5
    arena.dump_and_wait(job, image)
    arena.restore_and_wait(job, image)
    job.assert_goes_on()
    assert not arena.runs_of(*job.pids)


def _owner_at(shot: Shot, moment: float | str, image: Path) -> int | None:
    """Wait for the owner and then for the moment, counted from the owner's start; the owner's pid."""
    found: list[int] = []

    def is_there() -> bool:
        owner = arena.owner_of(shot.main.pid)
        found.extend([owner] if owner else [])
        return bool(owner)

    shot.until(is_there)
    if isinstance(moment, str):
        _await_act(shot, moment, image)
    else:
        shot.until_seconds(moment, since=time.monotonic())
    return found[-1] if found else None


def test_criu_is_killed(job, place):
    """A CRIU that is killed while its code is in the job takes the job along; gpuckpt must say so.

    Where the job survives, its connection lives too: CRIU's network lock was removed for it.
    """
    image = place / "img"
    _, with_owner = _undisturbed(job, image)
    counts: Counter[str] = Counter()
    for number, rng in arena.rounds(4, CRIU_KILLS):
        shot = Shot("dump", "--tree", job.root, image, *SETTLE)
        found: list[int] = []

        def criu_is_there(shot: Shot = shot, found: list[int] = found) -> bool:
            criu = arena.criu_of(arena.owner_of(shot.main.pid))
            found.extend([criu] if criu else [])
            return bool(criu)

        shot.until(criu_is_there)
        shot.until_seconds(rng.uniform(0, with_owner / 2), since=time.monotonic())
        counts["killed" if found and arena.kill(found[-1]) else "had ended before"] += 1
        answer = shot.answer()
        assert answer is not None
        if answer.status == 31:
            counts["status 31, CRIU took the job along"] += 1
            assert answer.report["process"] == "gone", answer.report
            assert len(job.alive) < len(job.pids), job.describe()
            assert not image.exists() or job.alive, "an ended job with a complete image is a success"
            arena.remove_images(place)
            job.end()
            job = Job.start(_fresh(place / f"job-{number}"))
            continue
        _assert_truthful(answer, job, image, counts)
        # A job that CRIU took along after the publishing has run on for a moment before.
        _settle_account(job, image, counts, repeats=True)
    print(f"\nCRIU killed -9 in {CRIU_KILLS} dumps: {dict(counts)}")
    job.end()
    assert counts["killed"] >= 3
    assert not arena.runs_of(*job.pids)


def _fresh(directory: Path) -> Path:
    directory.mkdir(mode=0o700)
    return directory


def _assert_truthful(answer, job: Job, image: Path, counts: Counter[str]) -> None:
    assert answer is not None
    counts[f"status {answer.status}"] += 1
    said = (answer.status, answer.report["process"])
    assert said in ((0, "ended"), (30, "running")), (answer.error, answer.stderr)
    assert bool(job.alive) == (answer.status == 30), (said, job.describe(), answer.report)
    if answer.status == 0:
        assert image.exists()
    assert not image.with_name(image.name + ".partial").exists()

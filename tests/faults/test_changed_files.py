"""Files of a job that a restore puts back, replaces or cuts: as they were before, whoever is killed, unless it comes up."""

from __future__ import annotations

import os
import shutil
import sys
import threading
from collections import Counter
from pathlib import Path

import pytest

from tests import harness
from tests.faults import arena
from tests.faults.arena import SETTLE, Job, Shot
from tests.harness import gpuckpt, wait_for

pytestmark = [pytest.mark.criu, pytest.mark.timeout(600)]

KINDS = {"log": "log", "base": "pages", "gone": "append"}
OPTIONS = ("--overwrite-files", "--truncate-files")
CHANGES = ("make", "put", "replace", "cut")
"""Acts in the journal of the changes, which main makes; then those of the owner's."""
ACTS = {
    "main": (*CHANGES, "owner-started", "criu", "let-go"),
    "owner": ("order", "criu", "criu-started", "let-go"),
    "both": ("criu", "criu-started", "let-go"),
}


class Saved:
    """Three writers below a shell: one log has grown since, one file has changed, one is gone."""

    def __init__(self, place: Path) -> None:
        self.files = place / "files"
        self.files.mkdir()
        self.job = Job(place / "files" / "log")
        self.image = place / "img"
        self._start()
        arena.dump_and_wait(self.job, self.image, "--leave-running")
        before = self.seen()
        wait_for(lambda: all(self.seen()[name] != before[name] for name in KINDS), "they write")
        self.job.kill()
        (self.files / "gone").unlink()
        self.kept = place / "kept"
        shutil.copytree(self.files, self.kept)
        self.before = self.seen()

    def _start(self) -> None:
        program = harness.PROGRAMS / "filewriter.py"
        writers = (f"{sys.executable} -E -S {program} {kind} {self.files / name}" for name, kind in KINDS.items())
        argv = ["/bin/sh", "-c", " & ".join(writers) + " & wait"]
        actions = [(os.POSIX_SPAWN_OPEN, number, "/dev/null", os.O_RDWR, 0) for number in range(3)]
        root = os.posix_spawn(argv[0], argv, {}, file_actions=actions, setsid=True)
        self.job._known.add(root)
        threading.Thread(target=self.job._reap_for_ever, daemon=True).start()
        wait_for(lambda: all((self.files / name).exists() for name in KINDS), "they begin")
        wait_for(lambda: all((self.files / name).stat().st_size for name in KINDS), "they write")
        self.job.pids = (root, *arena.children(root))
        self.job._known.update(self.job.pids)
        assert len(self.job.pids) == 4

    def seen(self) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in sorted(self.files.iterdir())}

    def identities(self) -> dict[str, int]:
        return {path.name: path.stat().st_ino for path in sorted(self.files.iterdir())}

    def start(self, *options: object) -> Shot:
        return Shot("restore", self.image, *OPTIONS, *options, *SETTLE)

    def assert_as_before(self) -> None:
        """Every byte of every file, and nothing beside them."""
        assert self.seen() == self.before

    def assert_goes_on(self) -> None:
        """The tree works with the files it had; what was there lies beside."""
        now = self.seen()
        wait_for(lambda: all(self.seen()[name] != now[name] for name in KINDS), self.job.describe(), 30)
        assert self.job.alive == list(self.job.pids), self.job.describe()
        harness.assert_gapless(self.files / "log")
        (later,) = self.files.glob("log.later-*")
        (aside,) = self.files.glob("base.before-restore-*")
        assert self.before["log"].endswith(later.read_bytes())
        assert aside.read_bytes() == self.before["base"]
        assert len(list(self.files.iterdir())) == 5

    def forget(self) -> None:
        """End what was restored, as if it had never been."""
        self.job.kill()
        shutil.rmtree(self.files)
        shutil.copytree(self.kept, self.files)


@pytest.fixture
def saved(place):
    made = Saved(place)
    yield made
    made.job.end()


def _changed(main: int, act: str) -> bool:
    run = arena.run_of_main(main)
    if run is None:
        return False
    try:
        return f'"act": "{act}"' in (run / "file-changes").read_text()
    except OSError:
        return False


def _until(shot: Shot, act: str) -> None:
    if act in CHANGES:
        shot.until(lambda: _changed(shot.main.pid, act))
    else:
        shot.until(lambda: arena.journal_has(shot.main.pid, act))


def _assert_whole_or_as_before(saved: Saved, counts: Counter[str]) -> None:
    arena.wait_quiet(saved.job)
    if saved.job.alive:
        saved.assert_goes_on()
        counts["whole"] += 1
    else:
        # Main was killed before there was an owner, or both: the next to look takes the changes back.
        gpuckpt("restore", "--tree", saved.job.root)
        saved.assert_as_before()
        counts["as before"] += 1
    saved.forget()


@pytest.mark.parametrize("victim", ACTS)
def test_killed(saved, victim):
    counts: Counter[str] = Counter()
    for act in ACTS[victim]:
        shot = saved.start()
        _until(shot, act)
        owner = arena.owner_of(shot.main.pid)
        hit = [
            arena.kill(pid)
            for pid in (shot.main.pid, owner)
            if (pid == owner) == (victim == "owner") or victim == "both"
        ]
        counts["killed" if any(hit) else "had ended before"] += 1
        answer = shot.answer()
        if answer is not None and answer.status == 40:
            saved.assert_as_before()
        _assert_whole_or_as_before(saved, counts)
    shot = saved.start()
    assert shot.answer().status == 0
    saved.assert_goes_on()
    print(f"\n{victim} killed -9: {dict(counts)}")
    assert counts["killed"] >= 2
    assert counts["as before"]


def test_the_next_restore_finds_them_as_before(saved):
    """Without being asked to repair anything, and before it judges."""
    shot = saved.start()
    _until(shot, "replace")
    arena.kill(shot.main.pid)
    shot.answer()
    arena.wait_quiet(saved.job)
    if saved.job.alive:
        saved.forget()
    answer = gpuckpt("restore", saved.image)
    assert answer.status == 20, answer.error
    assert {f["id"] for f in answer.report["findings"] if f["verdict"] == "fail"} >= {"files-size", "files-changed"}
    saved.assert_as_before()
    arena.restore_and_wait(saved.job, saved.image, *OPTIONS)
    saved.assert_goes_on()


@pytest.mark.parametrize("signal_number", [2, 15])
def test_interrupted(saved, signal_number):
    shot = saved.start()
    _until(shot, "criu")
    os.kill(shot.main.pid, signal_number)
    answer = shot.answer()
    if answer.report["process"] == "restored":
        saved.assert_goes_on()
    else:
        assert answer.status == 128 + signal_number, answer.error
        saved.assert_as_before()


def test_the_tree_does_not_come_up(saved, place):
    criu, _ = harness.criu_or_reason()
    broken = place / "criu"
    broken.write_text(f'#!/bin/sh\n[ "$1" = restore ] && exit 1\nexec {criu} "$@"\n')
    broken.chmod(0o755)
    inodes = saved.identities()
    answer = gpuckpt("restore", saved.image, *OPTIONS, env={"GPUCKPT_CRIU": str(broken)})
    assert answer.status == 40, answer.error
    saved.assert_as_before()
    assert saved.identities() == inodes


def test_one_of_them_cannot_be_changed(saved):
    """The others are as before then: none is changed alone."""
    for name in ("log", "base"):
        arena.call("chattr", "+a", saved.files / name)
        try:
            answer = gpuckpt("restore", saved.image, *OPTIONS)
            assert answer.status == 40, answer.error
            assert str(saved.files / name) in answer.error["message"]
            saved.assert_as_before()
        finally:
            arena.call("chattr", "-a", saved.files / name)


def test_a_dry_run_touches_nothing(saved):
    inodes = saved.identities()
    answer = gpuckpt("restore", saved.image, *OPTIONS, "--dry-run")
    assert (answer.status, answer.report["outcome"]) == (0, "planned"), answer.error
    acts = {Path(one["path"]).name: one["act"] for one in answer.report["data"]["files"]}
    assert acts == {"log": "cut", "base": "replace", "gone": "put"}
    saved.assert_as_before()
    assert saved.identities() == inodes


def test_a_file_that_disappears_while_the_job_stands_still(saved, place):
    """Asked for, the dump fails and says which; the job runs on."""
    arena.restore_and_wait(saved.job, saved.image, *OPTIONS)
    criu, _ = harness.criu_or_reason()
    jealous = place / "criu"
    base = saved.files / "base"
    # After the checks, before the freeze.
    jealous.write_text(f'#!/bin/sh\n[ "$1" = dump ] && rm {base}\nexec {criu} "$@"\n')
    jealous.chmod(0o755)
    env = {"GPUCKPT_CRIU": str(jealous)}
    answer = gpuckpt(
        *("dump", "--tree", saved.job.root, place / "img2", "--leave-running", *SETTLE),
        *("--capture-files", saved.files / "base"),
        env=env,
    )
    assert (answer.status, answer.report["process"]) == (30, "running"), answer.error
    assert str(saved.files / "base") in answer.error["message"]
    assert not (place / "img2").exists()

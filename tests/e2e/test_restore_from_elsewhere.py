"""restore user@host:/path: the image lies elsewhere, its memory goes from the wire into the held tree."""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest

from gpuckpt.flows import spool
from tests import harness, packing
from tests.e2e import rounds
from tests.faults import arena
from tests.harness import Answer, Jobs, gpuckpt, resident, start_gpuckpt
from tests.sshd import REMOTE_COMMAND, ROOT

pytestmark = pytest.mark.criu

MIB = 1 << 20
SPOOLS = Path("/run/gpuckpt/spools")


def reach(sshd, host="far", config=None) -> list[object]:
    command = [] if host == "bare" else ["--remote-command", REMOTE_COMMAND]
    return ["--ssh-config", config or sshd.config, *command]


def restore(jobs, sshd, image: Path, *options, host="far", config=None, **how) -> Answer:
    """A restore over the wire that must work."""
    answer = gpuckpt("restore", f"{host}:{image}", *reach(sshd, host, config), *rounds.SETTLE, *options, **how)
    jobs.adopt(*answer.report["data"].get("pids", ()))
    assert (answer.status, answer.report["process"]) == (0, "restored"), rounds.explain(answer)
    return answer


def dumped(jobs, work, kind="private", megabytes=96, *options) -> int:
    """Save a program whose memory says whether it is what it was; returns its last number."""
    job = jobs.python("memory.py", kind, work / "log", megabytes)
    harness.wait_for_count(work / "log", 1)
    rounds.dump(jobs, job.pid, work / "image", *options)
    return harness.numbers(work / "log")[-1]


def stored_here() -> list[Path]:
    """What was fetched and lies here still, and pages made for CRIU."""
    return [*SPOOLS.glob("*/data"), *Path("/dev/shm").glob("gpuckpt-" + "[0-9a-f]" * 8)]


@pytest.mark.parametrize("host", ["far", "bare"])
def test_memory_goes_from_the_wire_into_the_tree(work, jobs, sshd, host):
    at_dump = dumped(jobs, work)
    answer = restore(jobs, sshd, work / "image", "--connections", 3, host=host)
    data = answer.report["data"]
    assert data["image"] == f"{host}:{work}/image"
    assert data["bytes_injected"] > 40 * MIB
    assert data["bytes_fetched"] > 40 * MIB
    assert 1 <= data["connections"] <= 3
    assert {"transfer", "criu", "inject", "ready"} <= set(data["seconds"])
    rounds.goes_on(work / "log", at_dump, more=2)
    assert stored_here() == []


def test_processes_that_share_memory(work, jobs, sshd):
    """What shows whether they share it is read over the wire, and so is what CRIU restores itself."""
    at_dump = dumped(jobs, work, "tree", 64)
    data = restore(jobs, sshd, work / "image").report["data"]
    assert data["bytes_by_criu"] > 30 * MIB
    rounds.goes_on(work / "log", at_dump, more=1)
    assert stored_here() == []


@pytest.mark.parametrize("way", ["--plain", "an image without packs"])
def test_what_must_lie_here_lies_here_for_the_time_of_the_restore(work, jobs, sshd, way):
    (work / "place").mkdir(mode=0o700)
    at_dump = dumped(jobs, work, "private", 64, *(() if way == "--plain" else ("--plain",)))
    options = ("--plain",) if way == "--plain" else ()
    answer = restore(jobs, sshd, work / "image", *options, env={"GPUCKPT_TMPDIR": str(work / "place")})
    assert any(f"fetched to {work}/place/gpuckpt-" in note for note in answer.report["data"]["notes"])
    assert answer.report["data"]["bytes_injected"] == 0
    rounds.goes_on(work / "log", at_dump, more=1)
    assert not list((work / "place").iterdir())


def test_wait_stays_with_the_tree_and_not_with_the_other_host(work, jobs, sshd):
    at_dump = dumped(jobs, work, "private", 64)
    run = jobs.own(start_gpuckpt("restore", f"far:{work}/image", *reach(sshd), "--wait"))
    [pid] = [one["id"]["pid"] for one in rounds.manifest(work / "image")["tree"]["processes"]]
    jobs.adopt(pid)
    rounds.goes_on(work / "log", at_dump, more=1)
    harness.wait_for(lambda: not any("ssh" in arena.command_of(one) for one in arena.children(run.pid)), "it lets go")
    os.kill(pid, signal.SIGTERM)
    out, _ = run.communicate(timeout=60)
    assert run.returncode == 128 + signal.SIGTERM, out
    assert '"bytes_injected": 0' not in out
    assert stored_here() == []


def test_nothing_is_touched_where_a_check_refuses(work, jobs, sshd):
    job = jobs.python("counter.py", work / "log", 20)
    harness.wait_for_count(work / "log", 2)
    rounds.dump(jobs, job.pid, work / "image", "--leave-running")
    answer = gpuckpt("restore", f"far:{work}/image", *reach(sshd))
    assert "pids-free" in rounds.refused(answer)
    assert harness.alive(job.pid)
    assert stored_here() == []


def test_link_remap_files_wait_until_all_memory_is_known_to_be_good(work, jobs, sshd):
    """They are used up by CRIU: a frame that is damaged is found before. The image is named as a series' newest."""
    job = jobs.python("kinds.py", "pool", work / "log", "spawn")
    harness.wait_for_count(work / "log", 2)
    rounds.dump(jobs, job.pid, work / "image")
    at_dump = harness.numbers(work / "log")[-1]
    (work / "latest").symlink_to("image")
    answer = restore(jobs, sshd, work / "latest")
    assert any("known to be good" in note for note in answer.report["data"]["notes"])
    rounds.goes_on(work / "log", at_dump, more=2)
    assert stored_here() == []


def test_what_a_killed_restore_had_fetched_goes_with_the_next(work, jobs, sshd):
    """Killed before it had an owner that could see to it."""
    dumped(jobs, work, "private", 64, "--plain")
    run = start_gpuckpt("restore", f"far:{work}/image", *reach(sshd), "--bwlimit", "8M")
    harness.wait_for(lambda: list(SPOOLS.glob("*/data/whole.partial/criu/pages-*")), "its memory is being fetched")
    run.kill()
    run.communicate()
    left = list(SPOOLS.iterdir())
    # Any run that may touch something sees to it.
    other = jobs.python("counter.py", work / "other")
    harness.wait_for_count(work / "other", 1)
    assert gpuckpt("dump", "--tree", other.pid, work / "img", "--leave-running", *rounds.SETTLE).status == 0
    assert not any(path.exists() for path in left)


def test_a_place_that_cannot_be_made(work, sshd):
    answer = gpuckpt("restore", f"far:{work}/image", *reach(sshd), env={"GPUCKPT_TMPDIR": str(work / "none")})
    assert (answer.status, "GPUCKPT_TMPDIR" in answer.error["hint"]) == (10, True), rounds.explain(answer)
    assert not list(SPOOLS.iterdir())


class Saved:
    """An image that many restores try; the program of it has ended."""

    def __init__(self, work: Path) -> None:
        self.work, self.image, self.log = work, work / "image", work / "log"
        self.jobs = Jobs()
        self.at_dump = dumped(self.jobs, work, "private", 160)
        self.pids = [one["id"]["pid"] for one in rounds.manifest(self.image)["tree"]["processes"]]
        self.content = self.log.read_bytes()

    def start(self, config, *options, host="far"):
        """A restore that takes its time."""
        return self.jobs.own(
            start_gpuckpt(
                "restore", f"{host}:{self.image}", "--ssh-config", config, "--remote-command", REMOTE_COMMAND,
                "--bwlimit", "12M", "--connections", 2, *rounds.SETTLE, *options,
            )
        )  # fmt: skip

    def is_held(self, run) -> None:
        """Wait until the tree is held and memory comes."""
        harness.wait_for(lambda: arena.journal_has(run.pid, "held") or run.poll() is not None, "it is held")
        assert run.poll() is None, run.communicate()

    def end_tree(self) -> None:
        """It came back whole: make it as if it had not."""
        assert all(harness.alive(pid) for pid in self.pids)
        for pid in self.pids:
            os.kill(pid, signal.SIGKILL)
        rounds.await_end(self.jobs, self.pids)
        self.log.write_bytes(self.content)

    def assert_nothing_left(self) -> None:
        """No process, no run, no file; the program has done nothing."""
        harness.wait_for(lambda: not any(harness.alive(pid) for pid in self.pids), f"{self.pids} have ended")
        harness.wait_for(lambda: arena.cleared_away(*self.pids), "the run is cleaned up")
        harness.wait_for(lambda: not stored_here(), "what was fetched goes")
        harness.wait_for(lambda: not any(harness.state(pid) for pid in self.pids), f"{self.pids} are reaped")
        assert self.log.read_bytes() == self.content


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    found = Saved(tmp_path_factory.mktemp("saved"))
    yield found
    found.jobs.end()


@pytest.mark.parametrize("victim", ["main", "owner"])
def test_killed_while_memory_comes(saved, sshd, victim):
    run = saved.start(sshd.config)
    saved.is_held(run)
    assert arena.kill(run.pid if victim == "main" else arena.owner_of(run.pid))
    run.communicate(timeout=100)
    assert run.returncode == (40 if victim == "owner" else -signal.SIGKILL)
    saved.assert_nothing_left()


def test_killed_at_any_moment(saved, sshd):
    """While it connects, fetches, waits for CRIU, fills memory, or watches: nothing is left, or a whole tree."""
    chance = random.Random(7)
    for limit in ("12M", "12M", "100M", "100M"):
        run = saved.start(sshd.config, "--bwlimit", limit)
        time.sleep(chance.uniform(0.2, 6))
        run.kill()
        run.communicate()
        harness.wait_for(lambda: arena.cleared_away(*saved.pids), "the run is cleaned up")
        if any(harness.alive(pid) for pid in saved.pids):
            rounds.goes_on(saved.log, saved.at_dump, more=1)
            saved.end_tree()
        # What was killed before it had an owner has its files seen to by the next run.
        spool.remove_dead()
        saved.assert_nothing_left()


def test_a_signal_while_the_other_side_is_silent(saved, sshd, proxy, tmp_path):
    line, config = proxy(tmp_path)
    run = saved.start(config)
    saved.is_held(run)
    line.silent_from = 0
    run.send_signal(signal.SIGTERM)
    out, err = run.communicate(timeout=100)
    assert run.returncode == 128 + signal.SIGTERM, out + err
    saved.assert_nothing_left()


def test_memory_that_does_not_come_any_more_leaves_nothing(saved, sshd, proxy, tmp_path):
    """The line is lost, and when it is back the image is gone. (For one that stays lost see flows/test_far_frames.py.)"""
    line, config = proxy(tmp_path)
    run = saved.start(config)
    saved.is_held(run)
    line.go_down()
    away = saved.image.rename(saved.image.with_name("away"))
    line.come_up()
    out, err = run.communicate(timeout=200)
    away.rename(saved.image)
    assert run.returncode == 40, out + err
    assert "the memory did not come" in out
    assert "nothing is left behind" in out
    saved.assert_nothing_left()


def test_a_damaged_frame_ends_the_tree_before_it_runs(saved, sshd, tmp_path):
    copy = tmp_path / "image"
    shutil.copytree(saved.image, copy)
    pack = packing.flip(copy, 0.7)
    answer = gpuckpt("restore", f"far:{copy}", *reach(sshd))
    assert (answer.status, answer.report["process"]) == (60, "untouched"), rounds.explain(answer)
    assert pack in answer.error["message"]
    saved.assert_nothing_left()


@pytest.mark.parametrize(("kind", "status"), [("path", 60), ("huge", 20), ("frame", 60), ("endless", 40)])
def test_a_far_side_that_lies(saved, sshd, kind, status):
    command = f"PYTHONPATH={ROOT} {sys.executable} {harness.PROGRAMS / 'lying_serve.py'} {kind}"
    answer = gpuckpt("restore", f"far:{saved.image}", "--ssh-config", sshd.config, "--remote-command", command)
    assert (answer.status, answer.report["process"]) == (status, "untouched"), rounds.explain(answer)
    saved.assert_nothing_left()


def test_a_dry_run_reads_no_memory(saved, sshd, tmp_path):
    copy = tmp_path / "image"
    shutil.copytree(saved.image, copy)
    for pack in (copy / "packs").glob("*.zst"):
        os.truncate(pack, 0)
    planned = gpuckpt("restore", f"far:{copy}", *reach(sshd), "--dry-run")
    assert (planned.status, planned.report["outcome"]) == (0, "planned"), rounds.explain(planned)
    assert any("was not read" in note for note in planned.report["data"]["notes"])
    saved.assert_nothing_left()


def test_a_line_that_comes_back_while_the_tree_is_held(saved, sshd, proxy, tmp_path):
    """The last one: it brings the program back."""
    line, config = proxy(tmp_path)
    run = saved.start(config)
    saved.is_held(run)
    line.go_down()
    assert any("connecting again" in event for event in run.stderr), "it did not try again"
    line.come_up()
    assert resident(run.pid) < 200 * MIB
    out, err = run.communicate(timeout=200)
    saved.jobs.adopt(*saved.pids)
    assert run.returncode == 0, out + err
    rounds.goes_on(saved.log, saved.at_dump, more=2)
    assert stored_here() == []

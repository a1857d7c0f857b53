"""What a killed run left: seen, said, removed or repaired; never in the way for ever, never the job's end."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gpuckpt.model.facts import ProcessId
from gpuckpt.owner import halfbuilt, networklock, runs
from gpuckpt.system import netfilter, netlock, procfs
from tests import harness
from tests.faults import arena
from tests.faults.arena import SETTLE, Job, Shot
from tests.harness import gpuckpt

pytestmark = pytest.mark.criu


def test_an_unlocked_partial_is_removed_and_said(job, place):
    (place / "img.partial" / "criu").mkdir(parents=True)
    (place / "img.partial" / "criu" / "pages-1.img").write_bytes(b"old")
    answer = arena.dump_and_wait(job, place / "img")
    assert any("img.partial" in note and "killed dump" in note for note in answer.report["data"]["notes"])
    assert "img.partial" in answer.stderr
    assert not (place / "img.partial").exists()
    arena.restore_and_wait(job, place / "img")
    job.assert_goes_on()


def test_a_locked_partial_is_busy(job, place):
    (place / "img.partial").mkdir()
    holder = os.open(place / "img.partial", os.O_RDONLY)
    fcntl.flock(holder, fcntl.LOCK_EX)
    answer = gpuckpt("dump", "--tree", job.root, place / "img", *SETTLE)
    assert answer.status == 22, answer.error
    assert str(place / "img.partial") in answer.error["message"]
    assert (place / "img.partial").is_dir()
    os.close(holder)
    job.assert_goes_on()
    arena.dump_and_wait(job, place / "img")


@pytest.mark.parametrize("kind", ["file", "link"])
def test_something_elses_partial_is_not_removed(job, place, kind):
    """A partial is a directory that gpuckpt made; a file or a link of that name is somebody's."""
    (place / "precious").mkdir()
    (place / "precious" / "data").touch()
    partial = place / "img.partial"
    partial.touch() if kind == "file" else partial.symlink_to("precious")
    answer = gpuckpt("dump", "--tree", job.root, place / "img", *SETTLE)
    assert answer.status == 20, answer.error
    assert os.path.lexists(partial)
    assert (place / "precious" / "data").exists()
    job.assert_goes_on()


def test_stale_run_directories_are_cleaned(job, place):
    """Of trees that have ended, of runs that never had an owner, and with a gate script elsewhere."""
    ended = subprocess.Popen(["/bin/true"])
    ended.wait()
    stale = []
    for name, has_order in (("stale000", True), ("stale001", False)):
        directory = arena.RUNS / name
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        pid = ended.pid if has_order else job.root
        ticks = 1 if has_order else procfs.process_id(job.root).start_ticks
        card = {"operation": "dump", "pid": 1, "since": 0, "ids": [[pid, ticks]]}
        (directory / "run.json").write_text(json.dumps(card))
        (directory / "lock").touch()
        if has_order:
            (directory / "journal").write_text('{"act": "order", "kind": "dump", "order": {}}\n{"act": "cri')
        stale.append(directory)
    script = Path("/var/tmp/gpuckpt-gate-stale000")
    script.touch()
    arena.dump_and_wait(job, place / "img", "--leave-running")
    assert not [directory for directory in stale if directory.exists()]
    assert not script.exists()


def test_packets_pass_again_although_a_person_must_be_told_of_the_run(place):
    """An owner whose main was killed leaves such words in the directory, for the next run."""
    directory = place / f"run-{os.getpid()}"
    directory.mkdir()
    (directory / runs.UNTOLD).write_text('["look at it"]')
    assert networklock.hold_back(directory, [netlock.Connection("192.0.2.1", 1, "192.0.2.2", 2)]) == []
    table = netfilter.Table(netfilter.INET, f"gpuckpt-{directory.name}")
    try:
        assert table in netfilter.list_tables()
        runs.settle(directory, None)
        assert table not in netfilter.list_tables()
        assert (directory / runs.UNTOLD).exists()
    finally:
        netfilter.delete_table(table.family, table.name)


def test_nonsense_in_the_runtime_directory(job, place):
    """Files that are no run's, cards that are no JSON: no reason to fail."""
    made = arena.RUNS / "nonsense"
    made.mkdir(mode=0o700, parents=True, exist_ok=True)
    (made / "run.json").write_text("[1, 2")
    (made / "journal").write_bytes(b"\xff\xfe\x00not json\n[]\n7\n")
    stray = arena.RUNS / "stray-file"
    stray.touch()
    try:
        arena.dump_and_wait(job, place / "img", "--leave-running")
        assert not made.exists()
    finally:
        stray.unlink(missing_ok=True)


@pytest.fixture
def unix_job(place: Path):
    """Without TCP: a killed CRIU leaves TCP sockets in repair mode, and the job dies of that."""
    started = Job.start(place, 1, "", "unix")
    yield started
    started.end()


def _interrupt_at_the_gate(job: Job, place: Path) -> Path:
    """Kill all three while CRIU stands at the gate (its code is out of the job there); the leftover run."""
    shot = Shot("dump", "--tree", job.root, place / "img-lost", *SETTLE)
    assert shot.until(lambda: arena.journal_has(shot.main.pid, "criu-started"))
    owner = arena.owner_of(shot.main.pid)
    # The owner stands still: nobody answers at the gate, and CRIU waits there.
    os.kill(owner, signal.SIGSTOP)
    criu = harness.wait_for(lambda: arena.criu_of(owner), "CRIU is there")
    harness.wait_for(lambda: any("gate_client" in arena.command_of(pid) for pid in arena.children(criu)), "at the gate")
    for pid in (criu, owner, shot.main.pid):
        arena.kill(pid)
    shot.answer()
    arena.wait_quiet(job)
    (leftover,) = arena.runs_of(*job.pids)
    return leftover


def test_a_leftover_of_a_running_tree_is_no_obstacle(unix_job, place):
    leftover = _interrupt_at_the_gate(unix_job, place)
    assert leftover.exists()
    answer = arena.dump_and_wait(unix_job, place / "img")
    assert any("interrupted dump" in note for note in answer.report["data"]["notes"]), answer.report["data"]
    assert not arena.runs_of(*unix_job.pids)
    arena.restore_and_wait(unix_job, place / "img")
    unix_job.assert_goes_on()


def test_inspect_says_what_was_interrupted(unix_job, place):
    _interrupt_at_the_gate(unix_job, place)
    answer = gpuckpt("inspect", "--tree", unix_job.root)
    assert answer.status == 0
    assert answer.report["data"]["interrupted"]["operation"] == "dump"
    assert answer.report["data"]["dumpable"] == "yes", "it runs: the next dump clears what is left"
    answer = gpuckpt("restore", "--tree", unix_job.root)
    assert (answer.status, answer.report["process"]) == (0, "running"), answer.error
    unix_job.assert_goes_on()
    assert gpuckpt("inspect", "--tree", unix_job.root).report["data"]["interrupted"] is None


def test_a_leftover_of_a_tree_that_is_held_is_repaired_first(unix_job, place):
    _interrupt_at_the_gate(unix_job, place)
    for pid in unix_job.pids:
        os.kill(pid, signal.SIGSTOP)
    harness.wait_for(lambda: all(harness.state(pid) == "T" for pid in unix_job.pids), "the job is stopped")
    answer = gpuckpt("dump", "--tree", unix_job.root, place / "img", *SETTLE)
    assert answer.status == 22, answer.error
    assert f"gpuckpt restore --tree {unix_job.root}" in answer.error["hint"]
    assert gpuckpt("inspect", "--tree", unix_job.root).report["data"]["dumpable"] == "no"
    answer = gpuckpt("restore", "--tree", unix_job.root)
    assert (answer.status, answer.report["process"]) == (0, "running"), answer.error
    unix_job.assert_goes_on()
    arena.dump_and_wait(unix_job, place / "img")


def test_a_committed_leftover_never_ends_a_tree_that_runs(unix_job, place):
    """Killed between the journal's `committed` and the commit: the job has run on, perhaps for hours."""
    leftover = _interrupt_at_the_gate(unix_job, place)
    with (leftover / "journal").open("a") as journal:
        journal.write('{"act": "committed", "leave_running": false}\n')
    answer = gpuckpt("restore", "--tree", unix_job.root)
    assert (answer.status, answer.report["process"]) == (0, "running"), answer.error
    assert answer.report["data"]["duty"] == "resume"
    unix_job.assert_goes_on()


def test_a_committed_leftover_of_a_tree_at_rest_is_finished(unix_job, place):
    """Nothing has run since the image: the ending is completed."""
    leftover = _interrupt_at_the_gate(unix_job, place)
    for pid in unix_job.pids:
        os.kill(pid, signal.SIGSTOP)
    harness.wait_for(lambda: all(harness.state(pid) == "T" for pid in unix_job.pids), "the job is stopped")
    with (leftover / "journal").open("a") as journal:
        journal.write('{"act": "committed", "leave_running": false}\n')
    answer = gpuckpt("restore", "--tree", unix_job.root)
    assert (answer.status, answer.report["process"]) == (0, "ended"), answer.error
    assert not unix_job.alive


def test_a_tree_that_nobody_left(job):
    """`restore --tree` of a job that runs: it is looked at, and goes on."""
    answer = gpuckpt("restore", "--tree", job.root)
    assert (answer.status, answer.report["process"]) == (0, "running"), answer.error
    job.assert_goes_on()


def test_a_tree_that_a_person_stopped(job):
    """Without a journal nobody knows of a stop by gpuckpt: what is stopped, its user stopped, and it stays so."""
    os.kill(job.root, signal.SIGSTOP)
    harness.wait_for(lambda: harness.state(job.root) == "T", "stopped")
    assert gpuckpt("restore", "--tree", job.root).status == 0
    assert harness.state(job.root) == "T"
    os.kill(job.root, signal.SIGCONT)
    job.assert_goes_on()


def _log(place: Path, text: str, *, age: float = 0.0) -> Path:
    log = place / "criu.log"
    log.write_text(text)
    os.utime(log, (time.time() - age, time.time() - age))
    return log


def test_a_stranger_with_a_pid_of_the_image_is_never_killed(place, jobs):
    """Alone the restore's own processes are: forked by its CRIU, born while it was at work."""
    child = jobs.start("/bin/sleep", "1000")
    stranger = child.pid
    born = procfs.process_id(stranger).start_ticks
    ours = f"(00.1) Forking task with {stranger} pid (flags 0x0)\n"
    for words, age, born_after in (
        ("(00.1) Running pre-restore scripts\n", 0, born - 100),
        (f"{ours}(00.2) Error: Can't fork for {stranger}: File exists\n", 0, born - 100),
        (ours, 0, born + 1),
        (ours, 3600, 0),
    ):
        log = _log(place, words, age=age)
        assert halfbuilt.end_half_built(log, [stranger], born_after=born_after, long_ago=True) == []
        assert harness.alive(stranger), words
    # And the same process, had that CRIU made it.
    log = _log(place, ours)
    found = halfbuilt.own_processes(log, [stranger], born_after=born - 100, long_ago=True)
    assert [one.pid for one in found] == [stranger]
    child.kill()
    child.wait()


def test_runs_of_other_trees_do_not_matter(job, place):
    """Locked, and of other pids: no business of this dump."""
    program = (
        "import sys, time\n"
        "from gpuckpt.model.facts import ProcessId\n"
        "from gpuckpt.owner import runs\n"
        "run = runs.begin('dump', [ProcessId(1, 1)])\n"
        "print(run.directory, flush=True)\n"
        "sys.stdin.read()\n"
        "run.finish(keep=False)\n"
    )
    other = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        directory = Path(other.stdout.readline().strip())
        arena.dump_and_wait(job, place / "img", "--leave-running")
        assert directory.exists()
        with pytest.raises(Exception, match=f"pid {other.pid}"):
            runs.begin("dump", [ProcessId(1, 1)])
    finally:
        other.communicate("")
    assert not directory.exists()

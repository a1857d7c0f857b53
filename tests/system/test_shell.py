"""A user's command line: to its end and no further, never longer than it may, with what it said."""

import os

import pytest

from gpuckpt.system.shell import MOST_LINES, run_line
from tests import harness


class Enough(Exception):
    """What a check raises."""


def pids_in(path):
    return [int(word) for word in path.read_text().split()] if path.exists() else []


def test_what_it_says_and_how_it_ends():
    heard = []
    ended = run_line('echo "a $GPUCKPT_X"; echo b >&2; read x; printf c; exit 3', {"GPUCKPT_X": "1"}, timeout=60, hear=heard.append)  # fmt: skip
    assert heard == ["a 1", "b", "c"]
    assert (ended.status, ended.ok, ended.describe()) == (3, False, "exited with 3: a 1 / b / c")
    assert run_line("kill -9 $$", {}, timeout=60).describe() == "was ended by SIGKILL"
    assert run_line("true", {}, timeout=60).ok


def test_it_has_the_environment_and_the_directory_of_the_caller(monkeypatch, tmp_path):
    monkeypatch.setenv("TOKEN", "t")
    monkeypatch.chdir(tmp_path)
    assert run_line('echo "$TOKEN $PWD"', {}, timeout=60).last_lines == (f"t {tmp_path}",)


def test_a_process_left_in_the_background_holds_nothing_up(tmp_path, jobs):
    """It has our pipe as its output, and goes on."""
    line = f"(trap '' PIPE; echo $(exec sh -c 'echo $PPID') >{tmp_path}/pid; while :; do echo noise; sleep 0.1; done) & echo done"  # fmt: skip
    ended = run_line(line, {}, timeout=50)
    assert ended.ok
    assert not ended.timed_out
    (pid,) = harness.wait_for(lambda: pids_in(tmp_path / "pid"), "the background process has started")
    jobs.adopt(pid)
    assert harness.alive(pid)


def test_it_is_ended_with_its_whole_group_when_its_time_is_over(tmp_path):
    """Both ignore SIGTERM, and the shell's child outlives the shell."""
    line = f"trap '' TERM; sleep 1000 & echo $! $$ >{tmp_path}/pids; wait; sleep 1000"
    ended = run_line(line, {}, timeout=1)
    assert (ended.timed_out, ended.ok) == (True, False)
    assert ended.describe() == "did not end in time"
    child, shell = pids_in(tmp_path / "pids")
    harness.wait_for(lambda: not (harness.alive(child) or harness.alive(shell)), "both have ended")


def test_one_that_heeds_sigterm_can_tidy_up(tmp_path):
    ended = run_line(f"trap 'echo bye; touch {tmp_path}/tidied; exit 0' TERM; sleep 1000 & wait", {}, timeout=1)
    assert (ended.timed_out, ended.last_lines) == (True, ("bye",))
    assert (tmp_path / "tidied").exists()


def test_who_checks_can_break_it_off(tmp_path):
    def check():
        if pids_in(tmp_path / "pid"):
            raise Enough

    with pytest.raises(Enough):
        run_line(f"echo $$ >{tmp_path}/pid; exec sleep 1000", {}, timeout=1000, check=check)
    (pid,) = pids_in(tmp_path / "pid")
    assert not harness.alive(pid)


def test_endless_output_costs_no_memory_and_does_not_outlast_the_limit():
    heard = []
    ended = run_line("yes; :", {}, timeout=1, hear=heard.append)
    assert ended.timed_out
    assert len(heard) == MOST_LINES + 1
    ended = run_line("head -c 3000000 /dev/zero | tr '\\0' x", {}, timeout=60)
    assert [len(line) for line in ended.last_lines] == [1000]


def test_nothing_of_ours_stays_open():
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        run_line("echo x", {}, timeout=60)
    assert len(os.listdir("/proc/self/fd")) == before

"""restore --wait: gpuckpt stands for the job, to whoever started it and to whoever sits at the terminal."""

from __future__ import annotations

import os
import signal
import subprocess
import termios

import pytest

from tests import harness
from tests.e2e import rounds, starting

pytestmark = pytest.mark.criu


@pytest.fixture
def image(work, jobs):
    """A talker as systemd starts it, dumped."""
    job = starting.start(jobs, "systemd", "pipe", work / "log")
    rounds.dump(jobs, job.pid, work / "img")
    job.close()
    return work / "img"


def wait_for_it(jobs, image, *options: object, **popen) -> subprocess.Popen:
    """gpuckpt restore --wait, with the job going on."""
    log = image.parent / "log"
    at_dump = harness.numbers(log)[-1]
    waiting = jobs.start(*starting.GPUCKPT, "restore", image, "--wait", *options, **popen)

    def counts() -> bool:
        assert waiting.poll() is None, "gpuckpt has ended"
        return harness.numbers(log)[-1] > at_dump + 2

    harness.wait_for(counts, "the job goes on")
    rounds.goes_on(log, at_dump)
    return waiting


@pytest.mark.parametrize(
    ("number", "status", "word"),
    [
        (signal.SIGUSR1, 0, "USR1"),
        (signal.SIGUSR2, 3, "USR2"),
        (signal.SIGTERM, 7, "TERM"),
        (signal.SIGALRM, 128 + signal.SIGALRM, ""),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_a_signal_goes_to_the_job_and_its_status_comes_back(work, jobs, image, number, status, word):
    with (work / "out").open("w") as out:
        waiting = wait_for_it(jobs, image, stdout=out)
    waiting.send_signal(number)
    assert waiting.wait(60) == status
    said = (work / "out").read_text().splitlines()
    assert (word in said) is bool(word)
    assert all(line.isdigit() or line == word for line in said), "nothing but the job writes to its stdout"


def test_a_job_killed_behind_its_back_gives_137(work, jobs, image):
    waiting = wait_for_it(jobs, image)
    os.kill(rounds.manifest(image)["tree"]["root"]["pid"], signal.SIGKILL)
    assert waiting.wait(60) == 137


def test_the_parent_of_the_job_is_there_as_long_as_the_job(work, jobs, image):
    """The job stays in the cgroup that gpuckpt was started in: whoever ends that wants the job to end too."""
    waiting = wait_for_it(jobs, image)
    root = rounds.manifest(image)["tree"]["root"]["pid"]
    assert membership(root) == membership(waiting.pid)
    assert rounds.descendants(waiting.pid)[-1] == root


def membership(pid: int) -> str:
    """All lines of /proc/PID/cgroup."""
    with open(f"/proc/{pid}/cgroup") as file:
        return file.read()


def test_the_job_outlives_a_gpuckpt_that_is_killed(work, jobs, image):
    with (work / "out").open("w") as out:
        waiting = wait_for_it(jobs, image, stdout=out)
    waiting.kill()
    waiting.wait(10)
    rounds.goes_on(work / "log", harness.numbers(work / "log")[-1])


def test_the_waited_for_job_can_be_dumped_again(work, jobs, image):
    waiting = wait_for_it(jobs, image)
    rounds.dump(jobs, rounds.manifest(image)["tree"]["root"]["pid"], work / "again", "--leave-running")
    assert rounds.manifest(work / "again")["lineage"]["generation"] == 2
    rounds.goes_on(work / "log", harness.numbers(work / "log")[-1])
    waiting.terminate()
    assert waiting.wait(60) == 7


def test_stdin_reaches_the_job_and_a_file_takes_precedence(work, jobs):
    job = starting.start(jobs, "shell", "pipe", work / "log")
    rounds.dump(jobs, job.pid, work / "img")
    job.close()
    out, into = os.pipe()
    with (work / "own").open("w") as own:
        waiting = wait_for_it(jobs, work / "img", "--stdout", work / "out", stdin=out, stdout=own)
    os.close(out)
    os.write(into, b"piped\n")
    harness.wait_for(lambda: "heard piped" in (work / "out").read_text(), "the job hears it")
    os.close(into)
    waiting.terminate()
    assert waiting.wait(60) == 7
    assert (work / "own").read_text() == ""


@pytest.mark.parametrize("how", ["ssh -t", "shell", "script"])
class TestTerminal:
    """A job of a terminal at a new one."""

    @pytest.fixture
    def terminal(self, work, jobs, how):
        job = starting.start(jobs, how, "pty", work / "log")
        rounds.dump(jobs, job.pid, work / "img")
        job.close()
        at_dump = harness.numbers(work / "log")[-1]
        opened = starting.Terminal(jobs, *starting.GPUCKPT, "restore", work / "img", "--wait", rows=33, columns=99)
        rounds.goes_on(work / "log", at_dump)
        yield opened
        opened.close()

    def test_lines_keys_and_the_windows_size_go_through(self, work, jobs, terminal):
        terminal.see("SIZE 33 99")
        terminal.type("a line\n")
        terminal.see("heard a line")
        terminal.resize(44, 111)
        terminal.see("SIZE 44 111")
        terminal.type("\x03")
        terminal.see("INT")
        # The terminal is handed on as it is: what the job is not, gpuckpt is not either.
        harness.wait_for_count(work / "log", harness.numbers(work / "log")[-1] + 2)
        terminal.process.send_signal(signal.SIGUSR2)
        assert terminal.status() == 3
        assert "USR2" in terminal.text
        assert termios.tcgetattr(terminal.master) == terminal.before

    def test_it_outlives_a_gpuckpt_that_is_killed(self, work, jobs, terminal):
        terminal.process.kill()
        terminal.process.wait(10)
        rounds.goes_on(work / "log", harness.numbers(work / "log")[-1], more=20)

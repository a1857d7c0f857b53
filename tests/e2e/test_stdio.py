"""Standard streams that lead out of the tree: seen at the dump, asked for at the restore, and then they work."""

from __future__ import annotations

import pytest

from tests import harness
from tests.e2e import rounds, starting
from tests.harness import gpuckpt

pytestmark = pytest.mark.criu

OPTIONS = ("--stdin", "--stdout", "--stderr")
STARTERS = ("cron", "ssh", "systemd", "shell")


@pytest.mark.parametrize("kind", ["pipe", "socket"])
@pytest.mark.parametrize("how", STARTERS)
def test_each_stream_that_led_outside_gets_a_file(work, jobs, how, kind):
    fds = starting.STREAMS[how]
    job = starting.start(jobs, how, kind, work / "log")
    rounds.dump(jobs, job.pid, work / "img")
    at_dump = harness.numbers(work / "log")[-1]
    recorded = rounds.manifest(work / "img")["tree"]["outside_stdio"]
    assert [(one["fd"], one["kind"]) for one in recorded] == [(fd, kind) for fd in fds]
    job.close()

    without = gpuckpt("restore", work / "img")
    assert rounds.refused(without) == {"stdio"}
    assert " ".join(f"{OPTIONS[fd]} FILE" for fd in fds) in without.error["hint"]

    if 0 in fds:
        (work / "in").write_text("a line of its file\n")
    files = {fd: work / ("in" if fd == 0 else f"out{fd}") for fd in fds}
    rounds.restore(jobs, work / "img", *(word for fd in fds for word in (OPTIONS[fd], files[fd])))
    rounds.goes_on(work / "log", at_dump)
    said = files[1].read_text().splitlines()
    numbers = [int(line) for line in said if line.isdigit()]
    # A number is printed before it is logged: the cut may lie between the two.
    assert numbers[0] in (at_dump + 1, at_dump + 2)
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    assert ("heard a line of its file" in said) is (0 in fds)


@pytest.mark.parametrize("how", STARTERS)
def test_a_job_of_a_terminal_needs_wait_and_goes_on_at_the_new_one(work, jobs, how):
    job = starting.start(jobs, how, "pty", work / "log")
    rounds.dump(jobs, job.pid, work / "img")
    at_dump = harness.numbers(work / "log")[-1]
    recorded = rounds.manifest(work / "img")["tree"]["outside_stdio"]
    assert [one["kind"] for one in recorded] == ["tty"]
    job.close()

    without = gpuckpt("restore", work / "img", "--stdout", work / "out")
    assert rounds.refused(without) == {"terminal"}
    assert "--wait" in without.error["hint"]
    assert not (work / "out").exists()

    terminal = starting.Terminal(jobs, *starting.GPUCKPT, "restore", work / "img", "--wait")
    terminal.see(f"{at_dump + 3}")
    rounds.goes_on(work / "log", at_dump)
    if 0 in starting.STREAMS[how]:
        terminal.type("typed\n")
        terminal.see("heard typed")
    terminal.process.terminate()
    # The root of cron's and sshd's job is a shell, which the signal ends.
    assert terminal.status() == (143 if how in ("cron", "ssh") else 7)
    terminal.close()


def test_a_job_that_only_belongs_to_a_terminals_session_needs_none(work, jobs):
    """nohup JOB </dev/null >LOG 2>&1 & at a prompt."""
    line = f"set -m; {starting.TALKER} {work / 'log'} </dev/null >/dev/null 2>&1 & wait"
    terminal = starting.Terminal(jobs, "/bin/sh", "-c", line)
    harness.wait_for_count(work / "log", 2)
    (job,) = rounds.descendants(terminal.process.pid)[1:]
    rounds.dump(jobs, job, work / "img")
    assert rounds.manifest(work / "img")["tree"]["surroundings"]["has_terminal"] is True
    at_dump = harness.numbers(work / "log")[-1]
    terminal.close()
    rounds.restore(jobs, work / "img")
    rounds.goes_on(work / "log", at_dump)

"""Too little for gpuckpt itself: memory in its cgroup, descriptors; and the session that it runs in is taken away."""

from __future__ import annotations

import contextlib
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import harness, memory_cgroups
from tests.faults import arena
from tests.faults.arena import SETTLE, Shot
from tests.harness import gpuckpt

pytestmark = pytest.mark.criu

TIGHT_BYTES = 45 << 20
"""Enough for Python to start gpuckpt, not for the buffers of sixteen workers and the cache of what they write."""


@pytest.fixture
def tight():
    """A memory cgroup in which the out-of-memory killer will come."""
    found = memory_cgroups.place()
    if found is None:
        pytest.skip("no memory cgroup can be made here")
    made = found[0] / f"gpuckpt-oom-{os.getpid()}"
    try:
        made.mkdir()
        (made / found[1]).write_text(str(TIGHT_BYTES))
    except OSError as error:
        pytest.skip(f"no memory cgroup can be made here: {error.strerror}")
    yield made
    harness.wait_for(lambda: not (made / "cgroup.procs").read_text(), "the cgroup is empty")
    made.rmdir()


def kills(cgroup: Path) -> int:
    """How many processes the out-of-memory killer has taken there (cgroup v1 and v2)."""
    for name in ("memory.oom_control", "memory.events"):
        with contextlib.suppress(OSError):
            words = (cgroup / name).read_text().split()
            return int(words[words.index("oom_kill") + 1])
    return 0


@pytest.mark.parametrize("leave_running", [(), ("--leave-running",)])
def test_the_out_of_memory_killer_takes_main(place, tight, leave_running):
    """Twice as many megabytes as it may have, random ones: the tree goes on, as after any kill -9."""
    job = arena.Job.start(place, 100)
    try:
        shot = Shot("dump", "--tree", job.root, place / "img", "--workers", 16, *leave_running, *SETTLE)
        (tight / "cgroup.procs").write_text(str(shot.main.pid))
        answer = shot.answer()
        arena.wait_quiet(job)
        assert kills(tight) > 0
        assert not (place / "img").exists()
        assert answer is None or (answer.status, answer.report["process"]) == (30, "running"), answer.error
        job.assert_goes_on()
    finally:
        job.end()


def test_too_few_descriptors(job, place):
    """An operator's `ulimit -n`: one line, or it works; the tree goes on."""
    for count in (12, 20, 40, 256):
        words = f'ulimit -n {count} && exec "$@"'
        argv = ["sh", "-c", words, "sh", sys.executable, "-m", "gpuckpt", "dump", "--tree", job.root, place / "img"]
        line = [*map(str, argv), "--leave-running", *map(str, SETTLE)]
        done = subprocess.run(line, capture_output=True, text=True, timeout=120)
        assert done.returncode in (0, 10, 30), (count, done)
        assert "Traceback" not in done.stderr
        assert (place / "img").exists() == (done.returncode == 0)
        arena.wait_quiet(job)
        arena.remove_images(place)
        job.assert_goes_on()


@pytest.mark.parametrize("act", ["criu-started", "at-gate"])
def test_the_terminal_of_an_ssh_session_goes_away(job, place, act):
    """As sshd does it: the far end of the terminal is closed, and SIGHUP goes to its session."""
    child, master = pty.fork()
    if child == 0:
        argv = [sys.executable, "-m", "gpuckpt", "dump", "--tree", str(job.root), str(place / "img"), *map(str, SETTLE)]
        os.chdir(Path(__file__).parents[2])
        os.execv(sys.executable, argv)
    end = time.monotonic() + 60
    while not arena.journal_has(child, act) and time.monotonic() < end:
        time.sleep(0.005)
    os.close(master)
    _, status = os.waitpid(child, 0)
    arena.wait_quiet(job)
    code = os.waitstatus_to_exitcode(status)
    if (place / "img").exists():
        assert code == 0 or os.WIFSIGNALED(status) or code == 128 + signal.SIGHUP, code
        assert gpuckpt("inspect", "--verify", place / "img").status == 0
        assert not job.alive
        arena.restore_and_wait(job, place / "img")
    else:
        assert code in (128 + signal.SIGHUP, -signal.SIGHUP), code
    job.assert_goes_on()

"""How a process ended, told by the kernel to somebody who is not its parent."""

from __future__ import annotations

import os
import platform
import signal
import subprocess
import sys

import pytest

from gpuckpt.system import procfs

KERNEL = tuple(int(part) for part in platform.release().split(".")[:2])
ENDINGS = [
    ("import sys; sys.stdin.read(); sys.exit(3)", 3),
    ("import os, sys; sys.stdin.read(); os.kill(os.getpid(), 9)", -9),
]


@pytest.mark.parametrize(("program", "code"), ENDINGS)
def test_of_a_zombie_and_of_one_that_was_reaped(program, code):
    child = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE)
    with procfs.Watched(procfs.process_id(child.pid)) as watched:
        assert watched.wait_status() is None
        child.stdin.close()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert os.waitstatus_to_exitcode(watched.wait_status()) == code
        assert child.wait() == code
        after = watched.wait_status()
    # Linux tells it of reaped processes since 6.15.
    assert (after is None) == (KERNEL < (6, 15))
    assert after is None or os.waitstatus_to_exitcode(after) == code


def test_of_a_process_that_was_gone_before_nothing_is_known():
    child = subprocess.Popen([sys.executable, "-c", ""])
    identity = procfs.process_id(child.pid)
    child.wait()
    with procfs.Watched(identity) as watched:
        assert watched.wait_status() is None


def test_a_program_that_is_killed_by_a_signal_without_a_name():
    child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    with procfs.Watched(procfs.process_id(child.pid)) as watched:
        os.kill(child.pid, signal.SIGRTMIN + 3)
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert os.WTERMSIG(watched.wait_status()) == signal.SIGRTMIN + 3
    child.wait()

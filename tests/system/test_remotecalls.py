"""A held thread carries out calls for us, and then goes on as if nothing had been: whatever it was doing."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gpuckpt.system import procfs, remotecalls
from gpuckpt.system.hold import Hold, HoldError
from gpuckpt.system.remotecalls import BorrowedThread, CannotCall
from tests import harness

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")

GETPPID, CLOSE, DUP, PAUSE = 110, 3, 32, 34

# Each says `ready` when it is about to do what it is named for, and in the end what came of it.
PROGRAMS = {
    "sleeping": "say('ready'); began = time.monotonic(); time.sleep(1.5); say(1.4 < time.monotonic() - began < 15)",
    "reading": "say('ready'); say(os.read(0, 10) == b'words')",
    "polling": "say('ready'); p = select.poll(); p.register(0, 1); say(p.poll(60000) == [(0, 1)])",
    "waiting": "say('ready'); say(os.waitpid(child, 0)[1] == 0)",
    "counting": """
say('ready')
value, began = 1, time.monotonic()
for step in range(10**9):
    value = value * 6364136223846793005 + 1442695040888963407 & 2**64 - 1
    if step % 100000 == 0 and time.monotonic() - began > 1.5:
        break
other = 1
for _ in range(step + 1):
    other = other * 6364136223846793005 + 1442695040888963407 & 2**64 - 1
say(value == other)
""",
    "floating": """
say('ready')
value, began, steps = 1.5, time.monotonic(), 0
while time.monotonic() - began < 1.5:
    value, steps = (value * 1.0000001 + 0.1) % 7.0, steps + 1
other = 1.5
for _ in range(steps):
    other = (other * 1.0000001 + 0.1) % 7.0
say(value == other)
""",
}
HEAD = """
import os, select, signal, subprocess, sys, time
def say(what): os.write(1, (str(what) + "\\n").encode())
signal.signal(signal.SIGUSR1, lambda *_: say("signal"))
child = subprocess.Popen(["sleep", "1.5"]).pid if "waitpid" in sys.argv[1] else 0
exec(sys.argv[1])
"""


@pytest.fixture
def program():
    """Start one of the programs; ended after the test."""
    started: list[subprocess.Popen] = []

    def start(source: str, **how) -> subprocess.Popen:
        child = subprocess.Popen(
            [sys.executable, "-c", HEAD, source], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, **how
        )
        started.append(child)
        assert child.stdout.readline() == "ready\n"
        return child

    yield start
    for child in started:
        child.kill()
        child.communicate()


@contextlib.contextmanager
def held(pid: int):
    hold = Hold(exitkill=False)
    try:
        hold.take_all(lambda: procfs.threads(pid), time.monotonic() + 10)
        yield hold
    finally:
        hold.let_go()


def registers(pid: int) -> str:
    return Path(f"/proc/{pid}/syscall").read_text()


@pytest.mark.parametrize("name", PROGRAMS)
def test_it_goes_on_as_if_nothing_had_been(program, name):
    child = program(PROGRAMS[name])
    for _ in range(20):
        time.sleep(0.01)
        with held(child.pid) as hold:
            before = registers(child.pid)
            with BorrowedThread(hold, child.pid, child.pid) as thread:
                assert thread.call(GETPPID) == os.getpid()
                descriptor = thread.call(DUP, 1)
                assert Path(f"/proc/{child.pid}/fd/{descriptor}").exists()
                assert thread.call(CLOSE, descriptor) == 0
                with pytest.raises(OSError, match="Bad file descriptor"):
                    thread.call(CLOSE, descriptor)
            assert registers(child.pid) == before
    child.stdin.write("words")
    child.stdin.flush()
    assert child.stdout.readline() == "True\n"
    assert child.wait(20) == 0


def test_a_stopped_program_stays_stopped(program):
    child = program(PROGRAMS["reading"])
    os.kill(child.pid, signal.SIGSTOP)
    harness.wait_for(lambda: harness.state(child.pid) == "T", "it has stopped")
    with held(child.pid) as hold, BorrowedThread(hold, child.pid, child.pid) as thread:
        assert thread.call(GETPPID) == os.getpid()
    harness.wait_for(lambda: harness.state(child.pid) == "T", "it is stopped again")
    os.kill(child.pid, signal.SIGCONT)
    child.stdin.write("words")
    child.stdin.flush()
    assert child.stdout.readline() == "True\n"


def test_signals_wait_as_they_did(program):
    child = program(PROGRAMS["reading"])
    with held(child.pid) as hold:
        os.kill(child.pid, signal.SIGUSR1)
        with BorrowedThread(hold, child.pid, child.pid) as thread:
            assert thread.call(GETPPID) == os.getpid()
            os.kill(child.pid, signal.SIGUSR1)
            assert thread.call(GETPPID) == os.getpid()
        assert select.select([child.stdout], [], [], 0.1)[0] == []
    child.stdin.write("words")
    child.stdin.flush()
    assert [child.stdout.readline() for _ in range(2)] == ["signal\n", "True\n"]
    assert child.wait(20) == 0


@pytest.mark.parametrize("when", ["before", "between"])
def test_one_that_is_stopped_by_somebody_meanwhile_is_stopped_in_the_end(program, when):
    child = program(PROGRAMS["reading"])
    with held(child.pid) as hold:
        if when == "before":
            os.kill(child.pid, signal.SIGSTOP)
        with BorrowedThread(hold, child.pid, child.pid) as thread:
            assert thread.call(GETPPID) == os.getpid()
            os.kill(child.pid, signal.SIGSTOP)
            assert thread.call(GETPPID) == os.getpid()
    harness.wait_for(lambda: harness.state(child.pid) == "T", "it is stopped")
    os.kill(child.pid, signal.SIGCONT)
    child.stdin.write("words")
    child.stdin.flush()
    assert child.stdout.readline() == "True\n"


def test_a_thread_that_a_signal_is_on_its_way_to_is_left_alone(program):
    """The stop that the hold has found is the only one from which the signal can go on."""
    child = program(PROGRAMS["reading"])
    with held(child.pid) as hold:
        hold._held[child.pid] = signal.SIGUSR1
        with pytest.raises(CannotCall, match="signal"):
            BorrowedThread(hold, child.pid, child.pid)
        hold._held[child.pid] = 0


def test_a_thread_that_handles_its_calls_itself_is_left_alone(program):
    own = "import ctypes; none = ctypes.c_char(b'\\0'); l = ctypes.CDLL(None); "
    own += "done = l.prctl(59, 1, ctypes.c_ulong(0), ctypes.c_ulong(0), ctypes.byref(none)); say('ready'); "
    child = program(own + "say(done); say(os.read(0, 10) == b'words')")
    if child.stdout.readline() != "0\n":
        pytest.skip("this kernel knows no syscall user dispatch")
    with held(child.pid) as hold, pytest.raises(CannotCall, match="dispatch"):  # noqa: SIM117
        with BorrowedThread(hold, child.pid, child.pid):
            pass
    child.stdin.write("words")
    child.stdin.flush()
    assert child.stdout.readline() == "True\n"


def test_a_thread_that_does_not_come_back_in_time(program, monkeypatch):
    """That is said, and the hold knows that it runs: it can be ended."""
    monkeypatch.setattr(remotecalls, "CALL_SECONDS", 0.3)
    child = program(PROGRAMS["reading"])
    with held(child.pid) as hold:
        with pytest.raises(HoldError, match="did not stop in time"):  # noqa: SIM117
            with BorrowedThread(hold, child.pid, child.pid) as thread:
                thread.call(PAUSE)
        assert child.pid not in hold.tids
        # Not child.kill(): that asks first whether it has ended, and takes the stop of a traced child for that.
        os.kill(child.pid, signal.SIGKILL)
    harness.wait_for(lambda: not harness.alive(child.pid), "it has ended")


def test_several_threads_of_a_stopped_program(program):
    """As a restore finds it: each can be borrowed, and all are stopped afterwards."""
    text = "import threading; [threading.Thread(target=time.sleep, args=(3,), daemon=True).start() for _ in range(4)]; "
    child = program(text + PROGRAMS["reading"])
    os.kill(child.pid, signal.SIGSTOP)
    harness.wait_for(lambda: harness.state(child.pid) == "T", "it has stopped")
    with held(child.pid) as hold:
        assert len(hold.tids) == 5
        for tid in hold.tids:
            with BorrowedThread(hold, child.pid, tid) as thread:
                assert thread.call(GETPPID) == os.getpid()
    tasks = sorted(int(entry.name) for entry in Path(f"/proc/{child.pid}/task").iterdir())
    harness.wait_for(lambda: {harness.state(tid) for tid in tasks} == {"T"}, "all are stopped")
    os.kill(child.pid, signal.SIGCONT)
    child.stdin.write("words")
    child.stdin.flush()
    assert child.stdout.readline() == "True\n"


def test_one_that_is_killed_meanwhile(program):
    child = program(PROGRAMS["reading"])
    with held(child.pid) as hold, pytest.raises(HoldError):  # noqa: SIM117
        with BorrowedThread(hold, child.pid, child.pid) as thread:
            os.kill(child.pid, signal.SIGKILL)
            for _ in range(100):
                thread.call(GETPPID)
                time.sleep(0.01)
    assert child.wait(10) == -signal.SIGKILL


def allow_all() -> None:
    """A filter of system calls that lets every one through."""

    class Program(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_void_p))

    statement = ctypes.create_string_buffer(bytes.fromhex("060000000000ff7f"))
    program = Program(1, ctypes.addressof(statement))
    libc = ctypes.CDLL(None)
    assert libc.prctl(38, 1, 0, 0, 0) == 0  # PR_SET_NO_NEW_PRIVS
    assert libc.prctl(22, 2, ctypes.byref(program)) == 0  # PR_SET_SECCOMP, SECCOMP_MODE_FILTER


def test_a_filter_could_end_it(program):
    child = program(PROGRAMS["reading"], preexec_fn=allow_all)
    with held(child.pid) as hold, pytest.raises(CannotCall, match="seccomp"):
        BorrowedThread(hold, child.pid, child.pid)


def test_one_that_has_ended(program):
    child = program(PROGRAMS["reading"])
    with held(child.pid) as hold:
        child.kill()
        child.wait()
        with pytest.raises(CannotCall):
            BorrowedThread(hold, child.pid, child.pid)

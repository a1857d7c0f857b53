"""The owner, and CRIU below it: what protects them, and what stays bounded."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from gpuckpt.model.facts import ProcessId
from gpuckpt.owner import runs
from gpuckpt.owner.handle import OwnerHandle, SpareOwner
from gpuckpt.owner.messages import Channel, RepairOrder, TreeOrder, order_to_json
from gpuckpt.system import procfs
from gpuckpt.system.hold import Hold, HoldError
from tests import harness
from tests.faults import arena
from tests.faults.arena import SETTLE, Shot

pytestmark = pytest.mark.criu

ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def _ignores(pid: int | None) -> set[int]:
    mask = int(re.search(r"SigIgn:\t(\w+)", Path(f"/proc/{pid}/status").read_text()).group(1), 16)
    return {number for number in ENDING_SIGNALS if mask >> (number - 1) & 1}


def _oom_adj(pid: int | None) -> int:
    return int(Path(f"/proc/{pid}/oom_score_adj").read_text())


def _may_protect_from_oom() -> bool:
    words = "from gpuckpt.system import procfs; import sys; sys.exit(not procfs.set_own_oom_score_adj(-1000))"
    return subprocess.run([sys.executable, "-c", words]).returncode == 0


@contextlib.contextmanager
def _held_at_the_gate(shot: Shot):
    """The owner stands still, so CRIU waits at the gate for as long as the test looks; gives both pids."""
    assert shot.until(lambda: arena.journal_has(shot.main.pid, "criu-started"))
    owner = arena.owner_of(shot.main.pid)
    os.kill(owner, signal.SIGSTOP)
    try:
        # A process that is just becoming another program has no command line.
        yield owner, harness.wait_for(lambda: arena.criu_of(owner), "CRIU is there")
    finally:
        os.kill(owner, signal.SIGCONT)


def test_a_dumps_owner_and_criu_are_shielded(job, place):
    """What ends the programs of a unit or of a session passes by those whose death could take the job along."""
    shot = Shot("dump", "--tree", job.root, place / "img", *SETTLE)
    with _held_at_the_gate(shot) as (owner, criu):
        assert _ignores(owner) == _ignores(criu) == set(ENDING_SIGNALS)
        for pid in (owner, criu):
            for number in ENDING_SIGNALS:
                os.kill(pid, number)
        assert os.getsid(owner) == owner  # no terminal's signals
    assert shot.answer().status == 0


def test_the_oom_killer_takes_others_first(job, place):
    """The owner, and a dump's CRIU; not a restore's CRIU, and not the job."""
    if not _may_protect_from_oom():
        pytest.skip("this root may not lower oom_score_adj (no CAP_SYS_RESOURCE)")
    before = _oom_adj(job.root)
    shot = Shot("dump", "--tree", job.root, place / "img", *SETTLE)
    with _held_at_the_gate(shot) as (owner, criu):
        assert (_oom_adj(owner), _oom_adj(criu)) == (-1000, -1000)
    assert shot.answer().status == 0
    shot = Shot("restore", place / "img", *SETTLE)
    with _held_at_the_gate(shot) as (owner, criu):
        assert (_oom_adj(owner), _oom_adj(criu)) == (-1000, 0)
    assert shot.answer().status == 0
    assert [_oom_adj(pid) for pid in job.pids] == [before, before]


def test_the_gates_script_is_killed(job, place):
    """CRIU takes that as a no; the tree runs on, whether the image was complete already or not."""
    shot = Shot("dump", "--tree", job.root, place / "img", *SETTLE)
    with _held_at_the_gate(shot) as (_, criu):
        (script,) = harness.wait_for(
            lambda: [p for p in arena.children(criu) if "gate_client" in arena.command_of(p)], ""
        )
        arena.kill(script)
        harness.wait_for(lambda: not harness.alive(criu), "CRIU gives up")
    answer = shot.answer()
    assert (answer.status, answer.report["process"]) == (30, "running"), answer.error
    job.assert_goes_on()
    assert not arena.runs_of(*job.pids)
    assert not (place / "img.partial").exists()


def test_a_parent_that_never_reaps(place):
    """The tree has ended, and its zombie stays: the dump says so and ends all the same."""
    with lazy_parent(place) as (lazy, pid):
        answer = harness.gpuckpt("dump", "--tree", pid, place / "img", *SETTLE)
        assert answer.status == 0, answer.error
        assert harness.state(pid) == "Z"
        assert any(f"{pid}: zombie of {lazy.pid}" in note for note in answer.report["data"]["notes"]), answer.report
        assert harness.gpuckpt("restore", place / "img", *SETTLE).status == 20


def test_a_parent_that_reaps_late(place):
    """A dump does not wait for a slow init; the restore that follows at once does."""
    with lazy_parent(place) as (_, pid):
        assert harness.gpuckpt("dump", "--tree", pid, place / "img", *SETTLE).status == 0
        assert harness.state(pid) == "Z"
        later = threading.Timer(0.7, (place / "reap").touch)
        later.start()
        answer = harness.gpuckpt("restore", place / "img", *SETTLE)
        later.join()
        assert (answer.status, answer.report["process"]) == (0, "restored"), answer.error
        arena.kill(pid)


@contextlib.contextmanager
def lazy_parent(place):
    """A process that reaps its child only when there is a file PLACE/reap; and the child's pid."""
    program = (
        "import os, sys, time\n"
        "pid = os.posix_spawn(sys.executable, [sys.executable, '-c', "
        "'import os, time; os.setsid(); os.dup2(0, 1); os.closerange(3, 64); time.sleep(1000)'], {})\n"
        "print(pid, flush=True)\n"
        "while not os.path.exists(sys.argv[1]): time.sleep(0.01)\n"
        "os.waitpid(pid, 0)\n"
        "time.sleep(1000)\n"
    )
    nothing = subprocess.DEVNULL
    argv = [sys.executable, "-c", program, str(place / "reap")]
    lazy = subprocess.Popen(argv, stdin=nothing, stdout=subprocess.PIPE, stderr=nothing, text=True)
    try:
        pid = int(lazy.stdout.readline())
        harness.wait_for(lambda: os.getsid(pid) == pid, "it leads a session of its own")
        null = os.readlink(f"/proc/{pid}/fd/0")
        harness.wait_for(lambda: os.readlink(f"/proc/{pid}/fd/1") == null, "it holds no pipe")
        yield lazy, pid
    finally:
        lazy.kill()
        lazy.communicate()


def test_a_thread_in_uninterruptible_sleep_does_not_hang_the_hold():
    """A vfork parent sleeps in D until its child ends: the hold gives up after its limit, and the parent goes on."""
    program = (
        "import ctypes, os, sys, time\n"
        "libc = ctypes.CDLL(None)\n"
        "import subprocess\n"
        "print('up', flush=True)\n"
        "sys.stdin.readline()\n"
        # posix_spawn is a vfork: a child that waits in open() of a FIFO keeps its parent in D.
        "os.posix_spawn('/bin/true', ['true'], {}, file_actions=[(os.POSIX_SPAWN_OPEN, 3, sys.argv[1], os.O_RDONLY, 0)])\n"
        "print('went on', flush=True)\n"
        "sys.stdin.readline()\n"
    )
    import tempfile

    with tempfile.TemporaryDirectory() as directory:
        fifo = Path(directory) / "fifo"
        os.mkfifo(fifo)
        argv = [sys.executable, "-c", program, str(fifo)]
        parent = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        try:
            assert parent.stdout.readline() == "up\n"
            parent.stdin.write("\n")
            parent.stdin.flush()
            harness.wait_for(lambda: harness.state(parent.pid) == "D", "the parent sleeps in D")
            hold = Hold(exitkill=False)
            with pytest.raises(HoldError, match="did not stop in time"):
                hold.take_all(lambda: procfs.threads(parent.pid), time.monotonic() + 0.5)
            hold.let_go()
            os.close(os.open(fifo, os.O_WRONLY))  # the child goes on, and the parent with it
            # What was seized stays so until the holder ends: here it is let go once it has stopped.
            _detach_when_stopped(parent.pid)
            assert parent.stdout.readline() == "went on\n"
        finally:
            parent.kill()
            parent.communicate()


def _detach_when_stopped(pid: int) -> None:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        seen, status = os.waitpid(pid, os.WNOHANG | 0x40000000)
        if seen == pid and os.WIFSTOPPED(status):
            ctypes.CDLL(None).ptrace(17, pid, None, None)
            return
        time.sleep(0.01)
    raise AssertionError("the thread never stopped")


def test_waiting_for_an_unreaped_process_is_bounded():
    """`wait_gone` names the parent that does not reap, and returns."""
    child = subprocess.Popen(["/bin/true"])
    harness.wait_for(lambda: harness.state(child.pid) == "Z", "the child is a zombie")
    identity = procfs.process_id(child.pid)
    assert isinstance(identity, ProcessId)
    ((left, why),) = procfs.wait_gone([identity], 0.1)
    assert (left, why.split()[:3]) == (identity, ["zombie", "of", str(os.getpid())])
    child.wait()


def test_an_order_may_come_late(tmp_path):
    """Main prepares for as long as it takes (the pages of a large image), and says that it lives, before it orders."""
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    gone = ProcessId(ended.pid, 1)
    ours, theirs = socket.socketpair()
    argv = [sys.executable, "-m", "gpuckpt.owner.process", str(theirs.fileno()), str(tmp_path)]
    with ours, subprocess.Popen(argv, pass_fds=[theirs.fileno()]) as owner:
        theirs.close()
        channel = Channel(ours)
        channel.send("alive")
        channel.send("alive")
        channel.send(**order_to_json(RepairOrder(str(tmp_path), None, TreeOrder(gone, (gone,)), None)))
        assert channel.receive()["say"] == "repaired"
    assert owner.returncode == 0


def repaired(run, spare: SpareOwner) -> OwnerHandle:
    """An owner has carried out an order of that run."""
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    gone = ProcessId(ended.pid, 1)
    with OwnerHandle(run, spare=spare) as owner:
        owner.give(RepairOrder(str(run.directory), None, TreeOrder(gone, (gone,)), None))
        assert owner.channel.receive()["say"] == "repaired"
    assert owner.reap(30)
    return owner


@pytest.fixture
def run():
    """A run of a process that is no more."""
    begun = runs.begin("restore", [ProcessId(1 << 22, 1)])
    yield begun
    begun.finish(keep=False)


def test_a_spare_owner_takes_over_a_run(run):
    spare = SpareOwner()
    assert repaired(run, spare).pid == spare.child.pid
    spare.close()


def test_where_the_spare_owner_was_killed_another_one_is_started(run):
    spare = SpareOwner()
    arena.kill(spare.child.pid)
    assert repaired(run, spare).pid != spare.child.pid
    spare.close()


def test_a_spare_owner_ends_when_nobody_needs_it():
    spare = SpareOwner()
    spare.close()
    assert not harness.alive(spare.child.pid)

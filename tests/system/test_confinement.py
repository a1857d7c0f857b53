"""What a confined process cannot do: a process of its own gives root up and tries."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give it up")

TRY = """
import ctypes, errno, json, os, socket, sys, threading
from pathlib import Path
from gpuckpt.system import commands, confinement, files

inside, outside, victim = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
missing = confinement.confine(confinement.Keep(writes=(inside,)))
libc = ctypes.CDLL(None, use_errno=True)


def call(number, *arguments):
    if libc.syscall(number, *arguments) < 0:
        raise OSError(ctypes.get_errno(), "")


def tried(act):
    try:
        act()
    except OSError as error:
        return errno.errorcode[error.errno]
    return "done"


def in_a_thread():
    thread = threading.Thread(target=lambda: (inside / "of-a-thread").write_text("x"))
    thread.start()
    thread.join()


acts = {
    "make a file inside": lambda: (inside / "new").write_text("x"),
    "make a file inside from a thread": in_a_thread,
    "link between directories inside": lambda: os.link(inside / "a" / "file", inside / "b" / "file"),
    "rename inside": lambda: (inside / "b" / "file").rename(inside / "renamed"),
    "load a module": lambda: __import__("sqlite3"),
    "start a program": lambda: commands.run(["/usr/bin/id"], timeout=30),
    "make a file outside": lambda: (outside / "new").write_text("x"),
    "read a file outside": lambda: (outside / "file").read_text(),
    "list a directory outside": lambda: os.listdir(outside),
    "remove a file outside": lambda: (outside / "file").unlink(),
    "link out": lambda: os.link(inside / "a" / "file", outside / "linked"),
    "link in": lambda: os.link(outside / "file", inside / "stolen"),
    "rename out": lambda: (inside / "a").rename(outside / "a"),
    "truncate outside": lambda: os.truncate(outside / "file", 0),
    "change a mode outside": lambda: (outside / "file").chmod(0o4777),
    "change an owner outside": lambda: os.chown(outside / "file", 65534, 65534),
    "change times outside": lambda: os.utime(outside / "file", (0, 0)),
    "set an attribute outside": lambda: os.setxattr(outside / "file", "user.x", b"x"),
    "set an attribute outside by a new call": lambda: call(463, -100, b"x", 0, b"user.x", 0, 0),
    "signal a process of root's": lambda: os.kill(victim, 0),
    "read the memory of a process of root's": lambda: Path(f"/proc/{victim}/mem").open("rb"),
    "trace it": lambda: call(101, 16, victim, 0, 0),
    "make a socket": socket.socket,
    "make a name space": lambda: call(272, 0x10000000),
    "become root": lambda: os.setresuid(0, 0, 0),
    "make a device": lambda: os.mknod(inside / "device", 0o20600, os.makedev(1, 1)),
}
results = {name: tried(act) for name, act in acts.items()}
print(json.dumps({"missing": missing, "owner": files.user_of_files(), "results": results}), flush=True)
sys.stdin.read()
"""
ALLOWED = 6
"""So many of the first are what a transfer does."""


@pytest.fixture
def places(tmp_path) -> tuple[Path, Path]:
    inside, outside = tmp_path / "inside", tmp_path / "outside"
    for place in (inside / "a", inside / "b", outside):
        place.mkdir(parents=True, mode=0o700)
    (inside / "a" / "file").write_text("x")
    (outside / "file").write_text("secret")
    (outside / "file").chmod(0o600)
    return inside, outside


@pytest.fixture
def confined(places):
    argv = [sys.executable, "-c", TRY, *places, str(os.getpid())]
    child = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    yield child
    child.communicate(timeout=30)


def status_of(pid: int) -> dict[str, str]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def test_what_a_transfer_does_works_and_nothing_else(confined, places):
    told = json.loads(confined.stdout.readline())
    if told["missing"]:
        pytest.skip(f"this kernel cannot: {told['missing']}")
    names = list(told["results"])
    done = [name for name, what in told["results"].items() if what == "done"]
    assert done == names[:ALLOWED]
    assert set(told["results"].values()) <= {"done", "EACCES", "EPERM", "EXDEV", "ENOSYS", "ESRCH"}
    assert told["owner"] == 0
    made = (places[0] / "new").stat()
    assert (made.st_uid, made.st_gid) == (0, 0)

    status = status_of(confined.pid)
    assert status["Uid"].split() == ["65534", "65534", "65534", "0"]
    assert status["Gid"].split() == ["65534", "65534", "65534", "0"]
    assert status["Groups"] == ""
    assert {int(status[name], 16) for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")} == {0}
    assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2")


def test_below_a_directory_that_is_another_users_alone_it_may_search_and_nothing_more(places, tmp_path):
    """A home of mode 0700 on the way to the image: root without capabilities would not get there."""
    os.chown(tmp_path, 1234, 1234)
    (places[1] / "file").chmod(0o000)
    argv = [sys.executable, "-c", TRY, *places, str(os.getpid())]
    told = json.loads(subprocess.run(argv, input="", capture_output=True, text=True, timeout=60, check=True).stdout)
    if told["missing"]:
        pytest.skip(f"this kernel cannot: {told['missing']}")
    assert [name for name, what in told["results"].items() if what == "done"] == list(told["results"])[:ALLOWED]


def test_another_thread_is_not_left_behind(tmp_path):
    code = (
        "import threading, time\nfrom gpuckpt.system import confinement\nconfinement.THREAD_SECONDS = 0.1\n"
        "threading.Thread(target=time.sleep, args=(1,), daemon=True).start()\n"
        "try:\n    confinement.confine(confinement.Keep())\nexcept RuntimeError as error:\n    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert "would not be confined" in done.stdout


def test_it_ends_with_the_process_that_started_it(tmp_path):
    """The keeper is killed: its confined half must not go on without it."""
    code = (
        "import os, time\nfrom gpuckpt.system import commands, confinement\nkeeper = os.getpid()\n"
        "pid = commands.fork()\nif pid == 0:\n    confinement.confine(confinement.Keep())\n"
        "    confinement.end_with_parent(keeper)\n    print(os.getpid(), flush=True)\ntime.sleep(60)\n"
    )
    keeper = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    confined = int(keeper.stdout.readline())
    keeper.kill()
    keeper.wait(30)
    until = time.monotonic() + 30
    while Path(f"/proc/{confined}").exists() and status_of(confined).get("State", "Z").split()[0] != "Z":
        assert time.monotonic() < until, "it goes on"
        time.sleep(0.01)
    keeper.stdout.close()

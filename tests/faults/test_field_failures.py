"""Failures that users of CRIU meet in the field, with the real thing: said beforehand, by name, and the job unharmed.

tests/FAILURES.md says which known failure each test here stands for.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gpuckpt.model import manifest as manifests
from tests import harness
from tests.e2e import rounds
from tests.faults.arena import SETTLE
from tests.harness import Jobs, gpuckpt

pytestmark = pytest.mark.criu

HOLD = """
import ctypes, mmap, os, socket, struct, sys, time
place = sys.argv[1]
libc = ctypes.CDLL(None, use_errno=True)
def kernel(number, *arguments):
    got = libc.syscall(number, *arguments)
    if got < 0:
        open(place + "/up", "w").write(f"not here: {os.strerror(ctypes.get_errno())}")
        sys.exit(1)
    return got
"""
COUNT = """
log = os.open(place + "/log", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
open(place + "/up", "w").write("up")
number = 0
while True:
    number += 1
    os.write(log, b"%d\\n" % number)
    time.sleep(0.02)
"""


def counting(jobs: Jobs, place: Path, what: str, **popen) -> subprocess.Popen:
    """A job that does `what` first, and then counts; skips where this kernel does not have it."""
    child = jobs.start(sys.executable, "-S", "-c", HOLD + what + COUNT, place, **popen)
    harness.wait_for(lambda: (place / "up").exists() and (place / "up").read_text(), "the job has begun")
    if (place / "up").read_text() != "up":
        pytest.skip(f"what this job needs is {(place / 'up').read_text()}")
    harness.wait_for_count(place / "log", 2)
    return child


def assert_goes_on(place: Path, child: subprocess.Popen) -> None:
    """It counts, without a gap."""
    assert harness.state(child.pid) not in ("T", "t", "Z", "")
    rounds.goes_on(place / "log", harness.numbers(place / "log")[-1])


IO_URING = "ring = kernel(425, 4, (ctypes.c_char * 120)())\n"
OBJECTS = {
    "io_uring": (IO_URING, "io-uring", "io_uring"),
    "io_uring, mapped only": (
        IO_URING + "keep = mmap.mmap(ring, 4096, flags=mmap.MAP_SHARED); os.closerange(3, 256)\n",
        "io-uring",
        "io_uring",
    ),
    "perf_event": (
        "kernel(298, (ctypes.c_uint64 * 16)(1 | 120 << 32), 0, -1, -1, 0)\n",
        "kernel-objects",
        "perf_event",
    ),
    "userfaultfd": ("kernel(323, 1)\n", "kernel-objects", "userfaultfd"),
    "landlock": ("kernel(444, (ctypes.c_uint64 * 2)(1, 0), 8, 0)\n", "kernel-objects", "landlock"),
    "secret memory": (
        "fd = kernel(447, 0); os.ftruncate(fd, 4096); keep = mmap.mmap(fd, 4096)\n",
        "kernel-objects",
        "secretmem",
    ),
    "vsock": ("keep = socket.socket(40, socket.SOCK_STREAM)\n", "kernel-objects", "vsock"),
    "a device": ("keep = os.open('/dev/fuse', os.O_RDWR)\n", "devices", "/dev/fuse"),
    "a tunnel": ("keep = os.open('/dev/net/tun', os.O_RDWR)\n", "devices", "/dev/net/tun"),
    "a watch in /proc": (
        "fd = kernel(294, 0); libc.inotify_add_watch(fd, b'/proc/self/status', 2)\n",
        "inotify",
        "in /proc",
    ),
}


@pytest.mark.parametrize("kind", OBJECTS)
def test_what_criu_cannot_save_is_named_before_anything_is_touched(jobs, place, kind):
    what, check, word = OBJECTS[kind]
    child = counting(jobs, place, what)
    answer = gpuckpt("dump", "--tree", child.pid, place / "img", *SETTLE)
    assert rounds.refused(answer) == {check}, answer.error
    assert word in answer.error["message"]
    assert str(child.pid) in answer.error["message"]
    assert not list(place.glob("img*"))
    assert_goes_on(place, child)


def test_a_unix_connection_out_of_the_tree_names_its_peer(jobs, place):
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(place / "peer"))
    listener.listen()
    child = counting(jobs, place, "keep = socket.socket(socket.AF_UNIX); keep.connect(place + '/peer')\n")
    answer = gpuckpt("dump", "--tree", child.pid, place / "img", *SETTLE)
    assert rounds.refused(answer) == {"unix-outside"}
    assert str(os.getpid()) in answer.error["message"]
    assert_goes_on(place, child)
    listener.close()


def test_a_watch_on_a_file_that_is_gone_is_no_obstacle(jobs, place):
    """--force-irmap would break it."""
    (place / "watched").touch()
    child = counting(jobs, place, "fd = kernel(294, 0); libc.inotify_add_watch(fd, (place + '/watched').encode(), 2)\n")
    (place / "watched").unlink()
    rounds.dump(jobs, child.pid, place / "img")
    rounds.restore(jobs, place / "img")
    assert_goes_on(place, child)


def test_a_large_deleted_file_comes_back(jobs, place):
    """Above CRIU's own limit of 1 MiB."""
    what = """
file = open(place + "/ghost", "w+b")
file.write(b"g" * (3 << 20)); file.flush(); os.unlink(place + "/ghost")
"""
    child = counting(jobs, place, what)
    rounds.dump(jobs, child.pid, place / "img")
    rounds.restore(jobs, place / "img")
    assert_goes_on(place, child)
    (ghost,) = [one for one in Path(f"/proc/{child.pid}/fd").iterdir() if "ghost" in os.readlink(one)]
    assert ghost.read_bytes() == b"g" * (3 << 20)


@pytest.fixture
def own_program(jobs, place):
    """A job whose program is a file of its own."""
    program = place / "program"
    shutil.copy("/bin/sleep", program)
    child = jobs.start(program, "1000")
    harness.wait_for(lambda: os.readlink(f"/proc/{child.pid}/exe") == str(program), "it runs its own program")
    return child, program


def test_a_program_that_an_upgrade_replaced_while_it_ran(jobs, place, own_program):
    child, program = own_program
    program.unlink()
    shutil.copy("/bin/true", program)
    rounds.dump(jobs, child.pid, place / "img")
    rounds.restore(jobs, place / "img")
    assert harness.alive(child.pid)


def _other_size(program: Path) -> None:
    program.write_bytes(program.read_bytes() + b"more")


def _other_build(program: Path) -> None:
    """Same size: one byte of the build-id note, which `file` and CRIU read."""
    text = program.read_bytes()
    note = text.index(b"GNU\0", text.index(b"\x04\0\0\0\x14\0\0\0\x03\0\0\0")) + 4
    program.unlink()
    program.write_bytes(text[:note] + bytes([text[note] ^ 1]) + text[note + 1 :])
    program.chmod(0o755)


@pytest.mark.parametrize(
    ("change", "check"),
    [
        (_other_size, "files-build"),  # a program is told by its build, and once
        (_other_build, "files-build"),
        (lambda program: program.chmod(0o700), "files-mode"),
        (lambda program: program.unlink(), "files-missing"),
    ],
)
def test_another_program_under_the_same_name_is_refused(jobs, place, own_program, change, check):
    child, program = own_program
    original = program.read_bytes()
    rounds.dump(jobs, child.pid, place / "img")
    change(program)
    answer = gpuckpt("restore", place / "img", *SETTLE)
    assert check in rounds.refused(answer)
    assert str(program) in answer.error["message"]
    program.unlink(missing_ok=True)
    program.write_bytes(original)
    program.chmod(0o755)
    rounds.restore(jobs, place / "img")


def test_all_files_that_changed_are_named_at_once(jobs, place):
    """One has grown (and is cut back as the hint says), one is gone, and so is the working directory."""
    (place / "cwd").mkdir()
    what = "os.chdir(place + '/cwd'); a = open(place + '/grown', 'w'); b = open(place + '/lost', 'w')\na.write('x' * 800); a.flush()\n"
    child = counting(jobs, place, what)
    rounds.dump(jobs, child.pid, place / "img")
    with (place / "grown").open("a") as grown:
        grown.write("y" * 1000)
    (place / "lost").unlink()
    (place / "cwd").rmdir()
    answer = gpuckpt("restore", place / "img", *SETTLE)
    assert rounds.refused(answer) == {"files-size", "files-missing", "directories"}
    said = str(answer.report["findings"])
    for name in ("grown", "lost", "cwd"):
        assert str(place / name) in said
    (place / "cwd").mkdir()
    (place / "lost").touch()
    os.truncate(place / "grown", 800)
    rounds.restore(jobs, place / "img")
    assert_goes_on(place, child)


def test_the_original_still_runs(jobs, place):
    """Its pids are taken, and a second copy of it must not run."""
    child = counting(jobs, place, "")
    rounds.dump(jobs, child.pid, place / "img", "--leave-running")
    answer = gpuckpt("restore", place / "img", *SETTLE)
    assert rounds.refused(answer) & {"original", "pids-free"}
    assert str(child.pid) in answer.error["message"]
    assert_goes_on(place, child)


def test_a_port_that_is_taken_here(jobs, place):
    with socket.create_server(("127.0.0.1", 0)) as first:
        port = first.getsockname()[1]
    child = counting(jobs, place, f"keep = socket.create_server(('127.0.0.1', {port}))\n")
    rounds.dump(jobs, child.pid, place / "img")
    with socket.create_server(("127.0.0.1", port)):
        answer = gpuckpt("restore", place / "img", *SETTLE)
    assert rounds.refused(answer) == {"ports-free"}
    assert f"{port} by {os.getpid()}" in answer.error["message"]
    rounds.restore(jobs, place / "img")
    assert_goes_on(place, child)


def test_the_monotonic_clock_goes_on_where_it_stood(jobs, place):
    """A restored tree has a time namespace: timeouts that the job has set do not all pass at once."""
    what = "import threading\nzero = time.monotonic()\n"
    what += "say = lambda: open(place + '/clock', 'w').write(str(time.monotonic() - zero))\n"
    what += "import signal; signal.signal(signal.SIGUSR1, lambda *_: say())\n"
    child = counting(jobs, place, what)
    began = time.monotonic()
    rounds.dump(jobs, child.pid, place / "img")
    time.sleep(5)
    rounds.restore(jobs, place / "img")
    os.kill(child.pid, 10)
    harness.wait_for(lambda: (place / "clock").exists() and (place / "clock").read_text(), "it says its clock")
    assert float((place / "clock").read_text()) < time.monotonic() - began - 4


def test_a_restore_that_never_ends_is_ended(jobs, place):
    """CRIU can wait for ever, and take no notice of SIGTERM: the deadline ends it and what it has built."""
    child = counting(jobs, place, "")
    rounds.dump(jobs, child.pid, place / "img")
    criu, _ = harness.criu_or_reason()
    endless = place / "criu"
    endless.write_text(
        f'#!/bin/sh\n[ "$1" = restore ] && {{ trap "" TERM INT; while :; do sleep 0.1; done; }}\nexec {criu} "$@"\n'
    )
    endless.chmod(0o755)
    answer = gpuckpt("restore", place / "img", "--timeout", 4, env={"GPUCKPT_CRIU": str(endless)})
    assert (answer.status, answer.report["process"]) == (40, "untouched"), answer.error
    assert "--timeout" in answer.error["message"]
    rounds.restore(jobs, place / "img")
    assert_goes_on(place, child)


def test_crons_short_path(jobs, place):
    """/usr/bin:/bin only, no locale: CRIU is found all the same, and the lines are plain text."""
    child = counting(jobs, place, "")
    argv = [sys.executable, "-m", "gpuckpt", "dump", "--tree", str(child.pid), str(place / "img"), *map(str, SETTLE)]
    done = subprocess.run(
        argv,
        env={"PATH": "/usr/bin:/bin"},
        capture_output=True,
        timeout=120,
        stdin=subprocess.DEVNULL,
        cwd=harness.PROGRAMS.parents[1],
    )
    assert done.returncode == 0, done.stderr
    assert (done.stdout + done.stderr).isascii()
    assert b"\x1b" not in done.stdout + done.stderr


def test_a_cpu_that_lacks_what_the_images_had(jobs, place):
    """By default CRIU compares nothing, and the job would die of SIGILL some day."""
    child = counting(jobs, place, "")
    rounds.dump(jobs, child.pid, place / "img")
    body = rounds.manifest(place / "img")
    del body["blake3"]
    body["host"]["cpu"]["flags"].append("avx9999")
    body["blake3"] = manifests._digest(body)
    (place / "img" / "manifest.json").write_text(json.dumps(body))
    answer = gpuckpt("restore", place / "img", *SETTLE)
    assert rounds.refused(answer) == {"cpu-flags"}
    assert "avx9999" in answer.error["message"]
    rounds.restore(jobs, place / "img", "--allow", "cpu-flags")
    assert_goes_on(place, child)


def test_a_process_in_uninterruptible_sleep_is_named_beforehand(jobs, place):
    """A vfork parent sleeps in D until its child, which waits for a FIFO's writer, has begun.

    CRIU itself would try for a minute, and says it in a line that stands among the recorded logs.
    """
    os.mkfifo(place / "fifo")
    what = "open(place + '/up', 'w').write('up')\n"
    what += (
        "os.posix_spawn('/bin/true', ['true'], {}, file_actions=[(os.POSIX_SPAWN_OPEN, 3, place + '/fifo', 0, 0)])\n"
    )
    child = jobs.start(sys.executable, "-S", "-c", HOLD + what + COUNT, place)
    harness.wait_for(lambda: harness.state(child.pid) == "D", "it sleeps in D")
    answer = gpuckpt("dump", "--tree", child.pid, place / "img", "--dry-run")
    assert (answer.status, answer.report["process"]) == (0, "untouched"), answer.error
    (found,) = [one for one in answer.report["findings"] if one["id"] == "uninterruptible"]
    assert (found["verdict"], str(child.pid) in found["found"]) == ("fail", True)
    os.close(os.open(place / "fifo", os.O_WRONLY))
    harness.wait_for_count(place / "log", 2)
    child.poll()
    assert_goes_on(place, child)

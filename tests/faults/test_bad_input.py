"""Bad input and bad surroundings: one line of cause, one of remedy, the documented status, the job unharmed."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests import harness
from tests.faults import arena
from tests.faults.arena import SETTLE, Job, Shot
from tests.harness import Answer, gpuckpt

pytestmark = pytest.mark.criu

NOBODY = 65534


def assert_refused(answer: Answer, status: int, *words: str) -> None:
    """The status, the cause with these words, and a remedy; each one line."""
    assert answer.status == status, (answer.status, answer.error, answer.stderr)
    message, hint = answer.error["message"], answer.error["hint"]
    for word in words:
        assert word in message, (word, answer.error)
    assert message
    assert hint, answer.error
    assert "\n" not in message + hint, answer.error


def assert_untouched(job: Job, place: Path, *expected: str) -> None:
    """The job goes on, nothing was made in `place`, nothing is left in /run."""
    job.assert_goes_on()
    assert sorted(path.name for path in place.iterdir()) == sorted(["log", *expected])
    assert not arena.runs_of(*job.pids)


def _free_pid() -> int:
    top = int(Path("/proc/sys/kernel/pid_max").read_text())
    return next(pid for pid in range(top - 1, 2, -1) if not Path(f"/proc/{pid}").exists())


# What --tree names


@pytest.mark.parametrize("verb", ["dump", "inspect", "restore"])
def test_no_such_process(verb, place):
    image = [place / "img"] if verb == "dump" else []
    pid = _free_pid()
    assert_refused(gpuckpt(verb, "--tree", pid, *image), 21, str(pid))


@pytest.mark.parametrize("verb", ["dump", "inspect", "restore"])
def test_a_thread(verb, place, jobs):
    program = "import threading, time; threading.Thread(target=time.sleep, args=(1000,)).start()"
    child = jobs.start(sys.executable, "-c", program)
    tid = harness.wait_for(lambda: _threads(child.pid), "a thread")[0]
    image = [place / "img"] if verb == "dump" else []
    assert_refused(gpuckpt(verb, "--tree", tid, *image), 21, f"{tid} is a thread of process {child.pid}")
    assert harness.alive(child.pid)
    _end(child)


def _end(child: subprocess.Popen) -> None:
    child.kill()
    child.wait()


def _threads(pid: int) -> list[int]:
    return [int(path.name) for path in Path(f"/proc/{pid}/task").iterdir() if int(path.name) != pid]


@pytest.mark.parametrize("verb", ["dump", "inspect", "restore"])
def test_a_zombie(verb, place):
    child = subprocess.Popen(["/bin/true"])
    harness.wait_for(lambda: harness.state(child.pid) == "Z", "a zombie")
    image = [place / "img"] if verb == "dump" else []
    assert_refused(gpuckpt(verb, "--tree", child.pid, *image), 21, str(child.pid), "has ended")
    child.wait()


def test_a_kernel_thread(place):
    pid = next((int(path.name) for path in Path("/proc").glob("[0-9]*") if _is_kernel_thread(path)), None)
    if pid is None:
        pytest.skip("this pid namespace shows no kernel thread")
    assert_refused(gpuckpt("dump", "--tree", pid, place / "img"), 20, "kernel thread")


def _is_kernel_thread(directory: Path) -> bool:
    with contextlib.suppress(OSError, IndexError):
        flags = int((directory / "stat").read_text().rpartition(")")[2].split()[6])
        return bool(flags & 0x00200000)
    return False


TRACER = """
import ctypes, sys, time
assert ctypes.CDLL(None).ptrace(0x4206, int(sys.argv[1]), None, None) == 0
print("traces", flush=True)
time.sleep(1000)
"""


def test_traced_by_another(job, place):
    tracer = subprocess.Popen([sys.executable, "-c", TRACER, str(job.root)], stdout=subprocess.PIPE, text=True)
    try:
        assert tracer.stdout.readline() == "traces\n"
        assert_refused(gpuckpt("dump", "--tree", job.root, place / "img"), 20, "traced", str(tracer.pid))
    finally:
        tracer.kill()
        tracer.communicate()
    assert_untouched(job, place)


def test_our_own_ancestor(place):
    answer = gpuckpt("dump", "--tree", os.getpid(), place / "img")
    assert_refused(answer, 20)
    assert "own-ancestor" in answer.finding_ids
    assert list(place.iterdir()) == []


AS_NOBODY = """
import os, pkgutil, importlib, sys
import gpuckpt
for module in pkgutil.walk_packages(gpuckpt.__path__, "gpuckpt."):
    if not module.name.endswith(("__main__", "gate_client", "_probe")):
        importlib.import_module(module.name)
# All code is loaded: from here on as somebody who may not even read the directory where it lies.
os.setgroups([]); os.setgid(65534); os.setuid(65534)
from gpuckpt.cli.app import main
main()
"""


def _as_nobody(*arguments: object) -> Answer:
    argv = [sys.executable, "-c", AS_NOBODY, *map(str, arguments), "--json"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL)
    assert done.stdout, done.stderr
    return Answer(done.returncode, json.loads(done.stdout), done.stderr)


def test_somebody_elses_process_without_root(job, place):
    assert_refused(_as_nobody("dump", "--tree", job.root, place / "img"), 10)
    assert_untouched(job, place)


def test_ones_own_process_without_root(place, jobs):
    """Not root, and nothing foreign: what is missing is the privilege."""
    child = jobs.start("/bin/sleep", "1000", **arena.run_as(NOBODY))
    answer = _as_nobody("dump", "--tree", child.pid, "/tmp/gpuckpt-nobody-img")
    assert_refused(answer, 10)
    assert harness.alive(child.pid)
    _end(child)
    assert not Path("/tmp/gpuckpt-nobody-img").exists()


@pytest.mark.parametrize("verb", ["restore", "inspect"])
def test_an_image_that_may_not_be_read(verb, place):
    assert_refused(_as_nobody(verb, place / "img"), 10, "may not be read")


def test_a_place_that_may_not_be_read(place, jobs):
    child = jobs.start("/bin/sleep", "1000", **arena.run_as(NOBODY))
    assert_refused(_as_nobody("dump", "--tree", child.pid, place / "img"), 10)
    _end(child)


def test_root_without_capabilities(job, place):
    """The root of many a container."""
    argv = ["setpriv", "--bounding-set=-all", "--inh-caps=-all", sys.executable, "-m", "gpuckpt"]
    argv += ["dump", "--tree", str(job.root), str(place / "img"), "--json"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL)
    assert_refused(Answer(done.returncode, json.loads(done.stdout), done.stderr), 10)
    assert_untouched(job, place)


# Where the image shall go, or lies


def test_an_image_that_exists(job, place):
    for name in ("directory", "file"):
        target = place / name
        target.mkdir() if name == "directory" else target.touch()
        assert_refused(gpuckpt("dump", "--tree", job.root, target), 20, str(target), "exists")
        target.rmdir() if name == "directory" else target.unlink()
    assert_untouched(job, place)


def test_a_parent_that_is_missing(job, place):
    assert_refused(gpuckpt("dump", "--tree", job.root, place / "no" / "img"), 21, str(place / "no"))
    assert_refused(gpuckpt("dump", "--tree", job.root, place / "log" / "img"), 21, str(place / "log"))
    assert_untouched(job, place)


def test_a_name_too_long(job, place):
    """The image's name would do, that of its partial would not."""
    assert_refused(gpuckpt("dump", "--tree", job.root, place / ("x" * 250)), 20, "File name too long")
    assert_untouched(job, place)


def test_places_without_an_image(place):
    for verb in ("restore", "inspect"):
        assert_refused(gpuckpt(verb, place / "nothing"), 21, str(place / "nothing"))
        (place / "empty").mkdir(mode=0o700, exist_ok=True)
        assert_refused(gpuckpt(verb, place / "empty"), 60, "no manifest.json")
        (place / "x.partial").mkdir(mode=0o700, exist_ok=True)
        assert_refused(gpuckpt(verb, place / "x.partial"), 60, "never finished")


@pytest.mark.parametrize(
    "name",
    ['-dash and blank "quote" \'$(x)` ümläut-日本\nnew line back\\slash %s{}'.encode(), b"raw-\xff\xfe"],
    ids=["every sort", "no text"],
)
def test_an_odd_name(job, place, name):
    """Any bytes are a name: the image is made, found and restored."""
    directory = place / os.fsdecode(b"in " + name)
    directory.mkdir(mode=0o700)
    image = directory / os.fsdecode(name)
    answer = arena.dump_and_wait(job, image)
    assert answer.report["data"]["image"] == str(image)
    assert not job.alive
    arena.restore_and_wait(job, image)
    job.assert_goes_on()


def test_a_relative_path(job, place):
    answer = gpuckpt("dump", "--tree", job.root, "img", *SETTLE, cwd=place)
    assert (answer.status, answer.report["data"]["image"]) == (0, str(place / "img"))
    answer = gpuckpt("restore", "./img", *SETTLE, cwd=place)
    assert answer.status == 0, answer.error
    job.assert_goes_on()


def test_below_a_linked_directory(job, place):
    (place / "real").mkdir(mode=0o700)
    (place / "link").symlink_to("real")
    arena.dump_and_wait(job, place / "link" / "img")
    assert (place / "real" / "img" / "manifest.json").exists()
    arena.restore_and_wait(job, place / "link" / "img")
    job.assert_goes_on()


@contextlib.contextmanager
def _tmpfs(directory: Path, options: str):
    directory.mkdir(mode=0o700)
    arena.call("mount", "-t", "tmpfs", "-o", f"mode=0700,{options}", "none", directory)
    try:
        yield directory
    finally:
        arena.call("umount", directory)
        directory.rmdir()


def test_a_read_only_directory(job, place):
    with _tmpfs(place / "ro", "ro,size=100m") as directory:
        assert_refused(gpuckpt("dump", "--tree", job.root, directory / "img"), 20, "Read-only file system")
    assert_untouched(job, place)


def test_a_full_disk_is_seen_beforehand(job, place):
    with _tmpfs(place / "small", "size=2m") as directory:
        answer = gpuckpt("dump", "--tree", job.root, directory / "img")
        assert_refused(answer, 20, "disk-space")
        assert list(directory.iterdir()) == []
    assert_untouched(job, place)


_IMAGE_BYTES: list[int] = []


def _image_bytes(job: Job, place: Path) -> int:
    """Of an image of such a job, on the disk; found out once."""
    if not _IMAGE_BYTES:
        arena.dump_and_wait(job, place / "img", "--leave-running")
        _IMAGE_BYTES.append(sum(path.stat().st_blocks * 512 for path in (place / "img").rglob("*")))
        arena.remove_images(place)
    return _IMAGE_BYTES[0]


@pytest.mark.parametrize("leave_running", [False, True], ids=["ending", "leave-running"])
@pytest.mark.parametrize("short", [None, "all", "half", "some", "little"])
def test_the_disk_runs_full_in_the_middle(job, place, short, leave_running):
    """Too small for anything, for the pages, for the rest: the tree runs on, the partial is gone. None: it fits."""
    more = ["--leave-running"] if leave_running else []
    used = _image_bytes(job, place)
    size = {None: 4 * used, "all": 16 << 10, "half": used // 2, "some": used - (256 << 10), "little": used - (64 << 10)}
    with _tmpfs(place / "small", f"size={size[short] >> 10}k") as directory:
        answer = gpuckpt("dump", "--tree", job.root, directory / "img", *SETTLE, *more, "--allow", "disk-space")
        if short is None:
            assert answer.status == 0, answer.error
            if not leave_running:
                arena.restore_and_wait(job, directory / "img")
        else:
            assert_refused(answer, 20 if answer.report["process"] == "untouched" else 30)
            assert re.search(r"is full|No space left on device", answer.error["message"]), answer.error
            assert answer.report["process"] in ("untouched", "running")
            assert list(directory.iterdir()) == []
        job.assert_goes_on()
        assert not arena.runs_of(*job.pids)


def test_no_inodes_left(job, place):
    with _tmpfs(place / "small", "size=100m,nr_inodes=8") as directory:
        answer = gpuckpt("dump", "--tree", job.root, directory / "img", *SETTLE)
        assert_refused(answer, 30, "full")
        assert list(directory.iterdir()) == []
    assert_untouched(job, place)


# What this machine lacks


def _criu_script(place: Path, text: str) -> dict[str, str]:
    script = place / "criu"
    script.write_text(f"#!/bin/sh\n{text}\n")
    script.chmod(0o755)
    return {"GPUCKPT_CRIU": str(script)}


CRIUS = {
    "too-old": 'case "$1" in --version) echo "Version: 3.17.1";; *) echo "Error (criu/vdso.c:1): no vvar" >&2; exit 1;; esac',
    "too-old-but-content": 'case "$1" in --version) echo "Version: 3.17.1";; *) echo "Looks good.";; esac',
    "check-fails": 'case "$1" in --version) echo "Version: 4.2.1";; *) echo "Error (x.c:1): Kernel lacks it" >&2; exit 1;; esac',
    "says-nothing": "exit 0",
    "crashes": "kill -SEGV $$",
}


@pytest.mark.parametrize("kind", CRIUS)
def test_a_criu_that_cannot_work(job, place, kind):
    env = _criu_script(place, CRIUS[kind])
    assert_refused(gpuckpt("dump", "--tree", job.root, place / "img", env=env), 10, "criu")
    assert_untouched(job, place, "criu")


@pytest.mark.parametrize("path", ["/nonexistent/criu", "/etc/passwd", "/"])
def test_no_criu(job, place, path):
    env = {"GPUCKPT_CRIU": path, "PATH": "/nonexistent"}
    assert_refused(gpuckpt("dump", "--tree", job.root, place / "img", env=env), 10, path)
    assert_untouched(job, place)


def test_restore_without_criu(job, place):
    arena.dump_and_wait(job, place / "img")
    assert_refused(
        gpuckpt("restore", place / "img", env={"GPUCKPT_CRIU": "/nonexistent/criu"}), 10, "/nonexistent/criu"
    )
    assert not job.alive
    arena.restore_and_wait(job, place / "img")
    job.assert_goes_on()


def test_a_criu_that_fails_at_the_dump(job, place):
    """It passes every check and then cannot: 30, CRIU's own words, the log kept for the person."""
    real = harness.criu_or_reason()[0]
    script = (
        f'case "$1" in dump) echo "Error (criu/made-up.c:1): it just will not" >&2; exit 1;; *) exec {real} "$@";; esac'
    )
    answer = gpuckpt("dump", "--tree", job.root, place / "img", env=_criu_script(place, script))
    assert answer.status == 30, answer.error
    assert "it just will not" in answer.error["message"]
    assert_untouched(job, place, "criu")


READ_ONLY_RUN = """
import json, os, subprocess, sys
os.makedirs("/run/gpuckpt", exist_ok=True)
subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "none", "/run/gpuckpt"], check=True)
nothing = subprocess.DEVNULL
job = subprocess.Popen(["/bin/sleep", "1000"], stdin=nothing, stdout=nothing, stderr=nothing, start_new_session=True)
argv = [sys.executable, "-m", "gpuckpt", "dump", "--tree", str(job.pid), sys.argv[1], "--json"]
done = subprocess.run(argv, stdin=nothing, stdout=subprocess.PIPE, text=True)
print(json.dumps([done.returncode, json.loads(done.stdout), job.poll()]))
job.kill()
"""


def test_run_is_not_writable(place):
    """In a mount namespace of its own, for everybody else's sake."""
    argv = ["unshare", "--mount", sys.executable, "-c", READ_ONLY_RUN, str(place / "img")]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=True)
    status, report, ended = json.loads(done.stdout)
    assert_refused(Answer(status, report, done.stderr), 10, "/run/gpuckpt", "Read-only")
    assert ended is None
    assert list(place.iterdir()) == []


# Two at once


@contextlib.contextmanager
def _paused(shot: Shot, act: str):
    """Main stands still at an act, and holds what it holds."""
    assert shot.until(lambda: arena.journal_has(shot.main.pid, act)), shot.answer()
    os.kill(shot.main.pid, signal.SIGSTOP)
    harness.wait_for(lambda: harness.state(shot.main.pid) == "T", "main stands still")
    try:
        yield
    finally:
        os.kill(shot.main.pid, signal.SIGCONT)


def test_two_dumps_of_one_tree(job, place):
    shot = Shot("dump", "--tree", job.root, place / "img", *SETTLE)
    with _paused(shot, "at-gate"):
        # Its processes are traced by CRIU now: that is not what the person needs to hear.
        second = gpuckpt("dump", "--tree", job.root, place / "img2", *SETTLE)
        assert_refused(second, 22, "working on this tree", str(shot.main.pid))
        repair = gpuckpt("restore", "--tree", job.root)
        assert_refused(repair, 22, "working on this tree", str(shot.main.pid))
    assert shot.answer().status == 0
    assert not (place / "img2").exists()
    assert not (place / "img2.partial").exists()
    arena.restore_and_wait(job, place / "img")
    job.assert_goes_on()


def test_overlapping_trees(job, place):
    """The child alone, while the whole tree is being dumped."""
    shot = Shot("dump", "--tree", job.root, place / "img", *SETTLE)
    with _paused(shot, "owner-started"):
        second = gpuckpt("dump", "--tree", job.pids[1], place / "img2", *SETTLE)
        assert_refused(second, 22, str(shot.main.pid))
    assert shot.answer().status == 0


def test_two_trees_into_one_image(job, place, jobs):
    other = jobs.start("/bin/sleep", "1000")
    shot = Shot("dump", "--tree", job.root, place / "img", *SETTLE)
    with _paused(shot, "owner-started"):
        assert_refused(gpuckpt("dump", "--tree", other.pid, place / "img", *SETTLE), 22, str(place / "img"))
    assert shot.answer().status == 0
    assert harness.alive(other.pid)
    _end(other)
    arena.restore_and_wait(job, place / "img")
    job.assert_goes_on()


def test_two_restores_of_one_image(job, place):
    arena.dump_and_wait(job, place / "img")
    shot = Shot("restore", place / "img", *SETTLE)
    with _paused(shot, "owner-started"):
        second = gpuckpt("restore", place / "img", *SETTLE)
        assert second.status in (20, 22), second.error
    assert shot.answer().status == 0
    third = gpuckpt("restore", place / "img", *SETTLE)
    assert_refused(third, 20, "pids-free")
    job.assert_goes_on()


def test_many_dumps_at_once(job, place):
    """One wins; the others are refused, whatever the order of their steps."""
    shots = [Shot("dump", "--tree", job.root, place / f"img{n}", "--leave-running", *SETTLE) for n in range(5)]
    answers = [shot.answer() for shot in shots]
    statuses = sorted(answer.status for answer in answers)
    assert statuses[0] == 0
    assert set(statuses) <= {0, 20, 22}, [answer.error for answer in answers]
    for answer in answers:
        if answer.status == 20:  # the winner began between this one's two looks
            assert "traced" in answer.error["message"], answer.error
    job.assert_goes_on()
    assert not list(place.glob("*.partial"))


def test_the_modes_of_an_image(job, place):
    """0700 and 0600, whatever the umask: it holds the memory of the process."""
    before = os.umask(0)
    try:
        arena.dump_and_wait(job, place / "img", "--leave-running")
    finally:
        os.umask(before)
    for path in (place / "img", *(place / "img").rglob("*")):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


def test_standard_streams_that_are_closed(job, place):
    """A cron job may have none at all; the pipe's reader may have gone."""
    argv = [sys.executable, "-m", "gpuckpt", "dump", "--tree", str(job.root), str(place / "img"), *map(str, SETTLE)]
    closed = "import os, sys; [os.close(n) for n in (0, 1, 2)]; os.execv(sys.argv[1], sys.argv[1:])"
    subprocess.run([sys.executable, "-c", closed, *argv], timeout=120, check=False)
    assert (place / "img" / "manifest.json").exists()
    assert not job.alive
    reader, writer = os.pipe()
    os.close(reader)
    restore = [sys.executable, "-m", "gpuckpt", "restore", str(place / "img"), "--json", *map(str, SETTLE)]
    subprocess.run(restore, stdout=writer, stderr=writer, stdin=subprocess.DEVNULL, timeout=120, check=False)
    os.close(writer)
    job.assert_goes_on()


def test_nobody_reads_stderr(job, place):
    """A full pipe at stderr must not hold the job still."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writer, b"x" * 4096)
    os.set_blocking(writer, True)
    argv = [sys.executable, "-m", "gpuckpt", "dump", "--tree", str(job.root), str(place / "img"), "--leave-running"]
    child = subprocess.Popen([*argv, "--json", "--settle", "0.2"], stderr=writer, stdout=subprocess.PIPE, text=True)
    threading.Thread(target=child.communicate, daemon=True).start()
    harness.wait_for((place / "img").exists, "the image is there although nobody reads")
    job.assert_goes_on()
    os.close(reader)
    os.close(writer)
    child.wait(60)


def test_a_criu_that_vanishes(job, place):
    """It passed every check and is gone when the owner starts it."""
    real = harness.criu_or_reason()[0]
    last_of_the_checks = '[ "$1 $3" = "check --feature" ] && { sleep 1; rm -f "$0"; }'  # all are started by then
    script = f'{last_of_the_checks}; exec {real} "$@"'
    answer = gpuckpt("dump", "--tree", job.root, place / "img", env=_criu_script(place, script))
    assert_refused(answer, 30, "No such file", str(place / "criu"))
    assert_untouched(job, place)


def test_a_criu_that_vanishes_between_the_checks(job, place):
    script = f'rm -f "$0"; exec {harness.criu_or_reason()[0]} "$@"'
    answer = gpuckpt("dump", "--tree", job.root, place / "img", env=_criu_script(place, script))
    assert_refused(answer, 10, "cannot be started", str(place / "criu"))
    assert_untouched(job, place)


FULL_RUN = """
import json, os, subprocess, sys, time
os.makedirs("/run/gpuckpt", exist_ok=True)
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", "/run/gpuckpt"], check=True)
nothing = subprocess.DEVNULL
jobs = [
    subprocess.Popen(["/bin/sleep", "1000"], stdin=nothing, stdout=nothing, stderr=nothing, start_new_session=True)
    for _ in range(5)
]
said = []
for number, job in enumerate(jobs):
    with open("/run/gpuckpt/fill", "wb") as fill:
        fill.write(b"x" * (4096 * (15 - 2 * number)))
    image = f"{sys.argv[1]}{number}"
    argv = [sys.executable, "-m", "gpuckpt", "dump", "--tree", str(job.pid), image, "--json", "--settle", "0.2"]
    child = subprocess.Popen(argv, stdin=nothing, stdout=subprocess.PIPE, stderr=nothing, text=True)
    while child.poll() is None:
        job.poll()
        time.sleep(0.02)
    with open(f"/proc/{job.pid}/stat") if job.poll() is None else open("/dev/null") as stat:
        state = stat.read().rpartition(")")[2].split()[:1]
    said.append([child.returncode, json.loads(child.stdout.read()), state, os.path.exists(image)])
    job.kill()
print(json.dumps(said))
"""


def test_run_is_full(place):
    """With more room each time: whatever does not fit any more, the job runs or its image is complete."""
    argv = ["unshare", "--mount", sys.executable, "-c", FULL_RUN, str(place / "img")]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=240, check=True)
    for status, report, state, has_image in json.loads(done.stdout):
        assert (status, report["process"]) in ((10, "untouched"), (30, "running"), (0, "ended")), report["error"]
        if status == 0:
            assert (state, has_image) == ([], True), report
        else:
            assert_refused(Answer(status, report, done.stderr), status)
            assert state in (["S"], ["R"]), (status, report["error"], state)
            assert not has_image
    assert not list(place.glob("*.partial"))

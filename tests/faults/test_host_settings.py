"""Host settings that a run changes are put back, whoever is killed, and never from under another run or a person.

The real files below /sys and /proc/sys; what they held is put back after each test.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from gpuckpt.owner import hostchanges, runs
from gpuckpt.system import hostsettings, procfs
from gpuckpt.system.hostsettings import HUGE_PAGES, PIPE_SIZE
from tests import harness
from tests.faults import arena
from tests.faults.arena import SETTLE, Shot
from tests.harness import gpuckpt

pytestmark = [pytest.mark.criu, pytest.mark.alone]

RECORDS = Path("/run/gpuckpt/settings")
PUT_BACK = "transparent huge pages put back to madvise: a gpuckpt that was killed had left always"
LARGE = str(hostchanges.PIPE_LIMIT_BYTES)


@contextlib.contextmanager
def kept(setting, value):
    """The setting at a value; what it was before comes back at the end, and no record is left."""
    record = RECORDS / f"{setting.name}.json"
    hostchanges.put_back_dead()  # what other tests' kills have left: the next run would say it
    try:
        before = hostsettings.read(setting)
        hostsettings.write(setting, value)
    except OSError as error:
        pytest.skip(f"{setting.path} cannot be written here: {error.strerror}")
    try:
        yield
        assert not record.exists()
    finally:
        record.unlink(missing_ok=True)
        hostsettings.write(setting, before)


@pytest.fixture
def huge_pages():
    """The host without huge pages for everybody."""
    with kept(HUGE_PAGES, "madvise"):
        yield lambda: hostsettings.read(HUGE_PAGES)


@pytest.fixture
def pipe_size():
    """The kernel's default."""
    with kept(PIPE_SIZE, "1048576"):
        yield lambda: hostsettings.read(PIPE_SIZE)


@pytest.fixture
def app(fake_gpu, start_fake_cuda_app):
    fake_gpu.configure(total=8 << 30)
    started = start_fake_cuda_app("--mib", "16")
    started.wait_for_steps(3)
    return started


@pytest.fixture
def begin(jobs):
    """Start a run of our own, and end it as kill -9 would: its lock goes, its directory stays."""
    started = []

    def start() -> runs.Run:
        child = jobs.start("sleep", 1000)
        started.append(runs.begin("dump", [procfs.process_id(child.pid)]))
        return started[-1]

    yield start
    for run in started:
        with contextlib.suppress(OSError):
            os.close(run.lock_fd)
        shutil.rmtree(run.directory, ignore_errors=True)


def at(act, fake_gpu, app, *arguments):
    """A run that is in the driver's copy just now."""
    shot = Shot(*arguments, "--huge-pages", *SETTLE, env=fake_gpu.variables)
    assert shot.until(lambda: arena.journal_has(shot.main.pid, act)), shot.answer()
    return shot


def test_they_are_there_for_the_copies_and_not_between(place, fake_gpu, app, huge_pages):
    fake_gpu.configure(copy_ms=300)
    before = app.checksum()
    shot = at("checkpoint", fake_gpu, app, "dump", "--tree", app.pid, place / "img")
    assert huge_pages() == "always"
    assert shot.until(lambda: arena.journal_has(shot.main.pid, "at-gate"))
    assert huge_pages() == "madvise"  # the tree ends: no resume will come
    answer = shot.answer()
    assert (answer.status, answer.report["data"]["notes"]) == (0, []), answer.error
    fake_gpu.fail("restore=999")
    answer = gpuckpt("restore", place / "img", "--huge-pages", env=fake_gpu.variables)
    assert (answer.status, huge_pages()) == (40, "madvise"), answer.error
    fake_gpu.fail()
    shot = at("cuda-restore", fake_gpu, app, "restore", place / "img")
    assert huge_pages() == "always"
    answer = shot.answer()
    assert (answer.status, answer.report["data"]["notes"]) == (0, []), answer.error
    assert huge_pages() == "madvise"
    assert app.checksum() == before


def test_left_running_they_stay_until_after_the_resume(place, fake_gpu, app, huge_pages):
    fake_gpu.fail("checkpoint=999")
    dump = ("dump", "--tree", app.pid, place / "img")
    answer = gpuckpt(*dump, "--huge-pages", env=fake_gpu.variables)
    assert (answer.status, answer.report["process"], huge_pages()) == (30, "running", "madvise")
    fake_gpu.fail()
    fake_gpu.configure(copy_ms=300)
    shot = at("at-gate", fake_gpu, app, *dump, "--leave-running")
    assert shot.until(lambda: arena.journal_has(shot.main.pid, "cuda-restore"))
    assert huge_pages() == "always"
    assert shot.answer().status == 0
    assert huge_pages() == "madvise"


def test_without_cuda_they_do_nothing_and_it_is_said(job, place, begin, huge_pages):
    """And what a run that was killed has left is put back on the way."""
    dead = begin()
    hostchanges.change(HUGE_PAGES, "always", dead.directory)
    os.close(dead.lock_fd)
    notes = arena.dump_and_wait(job, place / "img", "--huge-pages").report["data"]["notes"]
    assert notes == [PUT_BACK, "--huge-pages did nothing: no process of the tree uses CUDA"]
    data = arena.restore_and_wait(job, place / "img", "--huge-pages").report["data"]
    assert "--huge-pages did nothing: no process of the image uses CUDA" in data["notes"]
    assert huge_pages() == "madvise"


def test_the_other_process_puts_them_back(place, fake_gpu, app, huge_pages):
    fake_gpu.configure(copy_ms=600)
    for victim in ("main", "owner"):
        shot = at("checkpoint", fake_gpu, app, "dump", "--tree", app.pid, place / "img")
        owner = arena.owner_of(shot.main.pid)
        assert huge_pages() == "always"
        assert arena.kill(shot.main.pid if victim == "main" else owner)
        answer = shot.answer()
        harness.wait_for(lambda: not arena.runs_of(app.pid), "the run is cleaned up")
        assert huge_pages() == "madvise"
    assert (answer.status, answer.report["process"]) == (30, "running"), answer.error
    app.wait_for_steps(3)


def test_the_other_process_puts_them_back_in_a_restore(place, fake_gpu, app, huge_pages):
    assert gpuckpt("dump", "--tree", app.pid, place / "img", env=fake_gpu.variables).status == 0
    fake_gpu.configure(copy_ms=600)
    for victim in ("owner", "main"):
        shot = at("cuda-restore", fake_gpu, app, "restore", place / "img")
        owner = arena.owner_of(shot.main.pid)
        assert huge_pages() == "always"
        assert arena.kill(shot.main.pid if victim == "main" else owner)
        answer = shot.answer()
        assert (answer and answer.status) == (None if victim == "main" else 40)
        if victim == "owner":
            os.waitpid(app.pid, 0)  # what the owner had built ended with it, as a child of ours
        harness.wait_for(lambda: not arena.runs_of(app.pid), "the run is cleaned up")
        assert huge_pages() == "madvise"
    app.wait_for_steps(3)  # the owner went on by itself


def test_both_killed_the_next_run_puts_them_back(place, fake_gpu, app, huge_pages):
    fake_gpu.configure(copy_ms=600)
    shot = at("checkpoint", fake_gpu, app, "dump", "--tree", app.pid, place / "img")
    owner = arena.owner_of(shot.main.pid)
    assert arena.kill(shot.main.pid)
    assert arena.kill(owner)
    shot.answer()
    harness.wait_for(lambda: not harness.alive(owner), "the owner is gone")
    [left] = [finding for finding in gpuckpt("inspect").report["findings"] if finding["id"] == "leftovers"]
    assert (left["verdict"], left["severity"]) == ("fail", "warn")
    assert "transparent huge pages at always, before it madvise" in left["found"]
    assert huge_pages() == "always"  # inspect never acts
    answer = gpuckpt("restore", "--tree", app.pid, env=fake_gpu.variables)
    assert answer.status == 0, answer.error
    assert huge_pages() == "madvise"
    assert not hostchanges.left_by_dead()
    app.wait_for_steps(3)


def test_the_last_of_two_runs_puts_back(begin, huge_pages):
    first, second = begin(), begin()
    assert hostchanges.change(HUGE_PAGES, "always", first.directory) == []
    assert hostchanges.change(HUGE_PAGES, "always", second.directory) == []
    assert hostchanges.put_back(first.directory) == []
    assert hostchanges.put_back(first.directory) == []
    assert huge_pages() == "always"
    assert hostchanges.put_back(second.directory) == []
    assert huge_pages() == "madvise"


def test_a_dead_run_does_not_count(begin, huge_pages):
    first, second, third = begin(), begin(), begin()
    hostchanges.change(HUGE_PAGES, "always", first.directory)
    hostchanges.change(HUGE_PAGES, "always", second.directory)
    os.close(first.lock_fd)
    assert hostchanges.put_back_dead() == hostchanges.put_back(third.directory) == []
    assert huge_pages() == "always"
    assert hostchanges.put_back(second.directory) == []
    assert huge_pages() == "madvise"


def test_a_run_takes_over_what_a_dead_one_left(begin, huge_pages):
    first, second = begin(), begin()
    hostchanges.change(HUGE_PAGES, "always", first.directory)
    os.close(first.lock_fd)
    assert hostchanges.change(HUGE_PAGES, "always", second.directory) == []
    assert hostchanges.left_by_dead() == ()
    hostchanges.put_back(second.directory)
    assert huge_pages() == "madvise"


def test_what_somebody_else_sets_meanwhile_stays(begin, huge_pages):
    run = begin()
    hostchanges.change(HUGE_PAGES, "always", run.directory)
    hostsettings.write(HUGE_PAGES, "never")
    [note] = hostchanges.put_back(run.directory)
    assert note == "transparent huge pages: somebody has set never meanwhile, and it stays (before the run: madvise)"
    assert huge_pages() == "never"
    assert hostchanges.put_back(run.directory) == []


def test_a_second_run_after_somebody_elses_change_brings_that_back(begin, huge_pages):
    first, second = begin(), begin()
    hostchanges.change(HUGE_PAGES, "always", first.directory)
    hostsettings.write(HUGE_PAGES, "never")
    assert hostchanges.change(HUGE_PAGES, "always", second.directory) == []
    assert hostchanges.put_back(second.directory) == hostchanges.put_back(first.directory) == []
    assert huge_pages() == "never"


def test_a_setting_that_serves_already_is_not_touched(begin, huge_pages):
    hostsettings.write(HUGE_PAGES, "always")
    run = begin()
    assert hostchanges.change(HUGE_PAGES, "always", run.directory) == []
    assert not (RECORDS / "huge-pages.json").exists()
    assert hostchanges.put_back(run.directory) == []
    assert huge_pages() == "always"


def test_killed_between_the_record_and_the_setting(begin, huge_pages):
    """The record says that it was changed, the setting is as before: there is nothing to do, or to say."""
    run = begin()
    hostchanges.change(HUGE_PAGES, "always", run.directory)
    hostsettings.write(HUGE_PAGES, "madvise")
    os.close(run.lock_fd)
    assert hostchanges.left_by_dead() == ()
    assert hostchanges.put_back_dead() == []
    assert huge_pages() == "madvise"


@pytest.mark.parametrize("record", ["", "{", "[]", '{"before": "madvise"}', '{"before": 1, "during": 2, "runs": 3}'])
def test_a_record_that_cannot_be_read_changes_nothing(begin, huge_pages, record):
    run = begin()
    hostchanges.change(HUGE_PAGES, "always", run.directory)
    hostchanges.put_back(run.directory)
    (RECORDS / "huge-pages.json").write_text(record)
    assert hostchanges.put_back_dead() == list(hostchanges.left_by_dead()) == []
    assert huge_pages() == "madvise"
    hostchanges.change(HUGE_PAGES, "always", run.directory)
    hostchanges.put_back(run.directory)
    assert huge_pages() == "madvise"


@contextlib.contextmanager
def read_only(path):
    """As most containers have it."""
    subprocess.run(["mount", "--bind", path, path], check=True)
    try:
        subprocess.run(["mount", "-o", "remount,ro,bind", path], check=True)
        yield
    finally:
        subprocess.run(["umount", path], check=True)


def test_where_it_cannot_be_written_the_run_goes_on_without(place, fake_gpu, app, huge_pages):
    with read_only(HUGE_PAGES.path):
        answer = gpuckpt("dump", "--tree", app.pid, place / "img", "--huge-pages", env=fake_gpu.variables)
    assert answer.status == 0, answer.error
    assert answer.report["data"]["notes"] == [
        "transparent huge pages could not be set to always (Read-only file system): the run went on without"
    ]
    assert huge_pages() == "madvise"


def test_what_cannot_be_put_back_now_is_put_back_later(begin, huge_pages):
    run = begin()
    hostchanges.change(HUGE_PAGES, "always", run.directory)
    with read_only(HUGE_PAGES.path):
        [note] = hostchanges.put_back(run.directory)
        assert "could not be put back to madvise (Read-only file system)" in note
        os.close(run.lock_fd)
        assert hostchanges.left_by_dead()
    assert hostchanges.put_back_dead()
    assert huge_pages() == "madvise"


def without_resource(*arguments):
    """gpuckpt as root without CAP_SYS_RESOURCE: all that exec gives is what the bounding set has left."""
    drop = "import ctypes, os, sys; assert not ctypes.CDLL(None).prctl(24, 24, 0, 0, 0); os.execv(sys.executable, sys.argv[1:])"
    return [sys.executable, "-c", drop, sys.executable, "-m", "gpuckpt", *map(str, arguments), "--json"]


class Watch:
    """Every value that a setting has had."""

    def __init__(self, setting):
        self.seen = set()
        self._setting = setting
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def _look(self):
        while not self._over.wait(0.002):
            self.seen.add(hostsettings.read(self._setting))

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._over.set()
        self._thread.join()


def dump_without_resource(job, place):
    argv = without_resource("dump", "--tree", job.root, place / "img", "--leave-running", *SETTLE)
    done = subprocess.run(argv, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout
    assert gpuckpt("inspect", place / "img", "--verify").status == 0
    job.assert_goes_on()
    return json.loads(done.stdout)["data"]["notes"]


def test_pipes_are_large_for_a_root_without_the_capability(job, place, pipe_size):
    with Watch(PIPE_SIZE) as watch:
        assert dump_without_resource(job, place) == []
    assert watch.seen == {"1048576", LARGE}
    assert pipe_size() == "1048576"


def test_the_limit_is_raised_only_where_it_binds(begin, pipe_size):
    """Whether this machine's root has the capability is read in another way than the tool finds it out."""
    run = begin()
    assert hostchanges.raise_pipe_limit(run.directory) == []
    assert pipe_size() == (LARGE if procfs.lacks_resource_capability() else "1048576")
    hostchanges.put_back(run.directory)
    assert pipe_size() == "1048576"


def test_killed_in_the_capture_the_pipe_size_comes_back(job, place, pipe_size):
    for victims in (("main",), ("owner",), ("main", "owner")):
        argv = without_resource("dump", "--tree", job.root, place / "img", "--leave-running", *SETTLE)
        main = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        harness.wait_for(lambda main=main: arena.journal_has(main.pid, "criu-started"), "CRIU is at work")
        owner = arena.owner_of(main.pid)
        for victim in victims:
            arena.kill(main.pid if victim == "main" else owner)
        main.wait(60)
        arena.wait_quiet(job)
        if len(victims) == 2:
            gpuckpt("restore", "--tree", job.root)
        assert pipe_size() == "1048576", victims
        assert not (RECORDS / "pipe-max-size.json").exists()
        arena.remove_images(place)
    job.assert_goes_on()


def test_where_the_sysctl_cannot_be_written_smaller_pipes_do(job, place, pipe_size):
    with read_only(PIPE_SIZE.path):
        [note] = dump_without_resource(job, place)
    assert note == f"fs.pipe-max-size could not be set to {LARGE} (Read-only file system): the run went on without"


def test_main_is_killed_before_it_gave_an_order(begin, pipe_size):
    """Main raises the limit while it prepares; the owner that waits for its order puts it back."""
    run = begin()
    ours, theirs = socket.socketpair()
    argv = [sys.executable, "-m", "gpuckpt.owner.process", str(theirs.fileno()), str(run.directory)]
    owner = subprocess.Popen(argv, pass_fds=[theirs.fileno()])
    theirs.close()
    assert hostchanges.raise_pipe_limit(run.directory) == []
    assert pipe_size() == str(16 << 20)
    ours.close()
    assert owner.wait() == 0
    assert pipe_size() == "1048576"


def test_who_is_not_root_gets_no_exception(begin, pipe_size):
    run = begin()
    hostchanges.raise_pipe_limit(run.directory)
    words = "from gpuckpt.owner import hostchanges; import os; os.setuid(65534); print(hostchanges.put_back_dead())"
    done = subprocess.run([sys.executable, "-c", words], capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert (done.stdout, done.returncode) == ("[]\n", 0), done.stderr
    hostchanges.put_back(run.directory)

"""Runs the real CRIU on small Python programs, for tests; skips where that is not possible."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gpuckpt.images import criuformat
from gpuckpt.system import commands

CRIU = commands.find_program("criu", os.environ.get("GPUCKPT_CRIU"))


def why_not():
    if os.geteuid() != 0:
        return "needs root"
    if CRIU is None:
        return "no criu here"
    done = subprocess.run([CRIU, "check"], check=False, capture_output=True, timeout=60)
    return None if done.returncode == 0 else f"criu check: {done.stderr[-200:]!r}"


def need_criu():
    reason = why_not()
    if reason:
        pytest.skip(reason)


def wait_for(condition, seconds=20):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        value = condition()
        if value:
            return value
        time.sleep(0.02)
    raise AssertionError(f"not so within {seconds} s")


class Lab:
    """One program, dumped and restored with plain CRIU options; ends what it started."""

    def __init__(self, directory: Path):
        self.directory = directory
        self.images = directory / "images"
        self.images.mkdir()
        (directory / "no-plugins").mkdir()
        self.report = directory / "report"
        self.started = None
        self.restored = None

    def start(self, program, *arguments):
        """Run `program`, which appends lines to the file in its first argument."""
        stderr = (self.directory / "stderr").open("ab")
        self.started = subprocess.Popen(
            [sys.executable, "-c", program, self.report, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=stderr,
            cwd="/",
            start_new_session=True,
        )
        stderr.close()
        return self.started.pid

    def lines(self):
        return self.report.read_text().splitlines() if self.report.exists() else []

    def criu(self, verb, *options):
        common = ["--no-default-config", "-L", self.directory / "no-plugins", "--manage-cgroups=ignore"]
        where = ["-D", self.images, "-W", self.directory, "-o", f"{verb}.log", "-v4"]
        argv = [CRIU, verb, *common, *where, *options]
        done = subprocess.run(argv, check=False, capture_output=True, timeout=60, stdin=subprocess.DEVNULL)
        log = (self.directory / f"{verb}.log").read_text()
        assert done.returncode == 0, (done.stdout, done.stderr, log[-3000:])
        return log

    def dump(self, *options):
        log = self.criu("dump", "-t", str(self.started.pid), *options)
        self.started.wait(10)
        # A zombie still holds its pid, and its group and session: init may take a second to reap it.
        for process in criuformat.read_process_list(self.images / "pstree.img"):
            wait_for(lambda pid=process.pid: not Path(f"/proc/{pid}").exists())
        return log

    def restore(self, *options):
        pidfile = self.directory / "pidfile"
        log = self.criu("restore", "-d", "--pidfile", pidfile, *options)
        self.restored = int(pidfile.read_text())
        return log

    def close(self):
        if self.started and self.started.poll() is None:
            self.started.kill()
            self.started.wait(10)
        if self.restored:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.restored, signal.SIGKILL)
        shutil.rmtree(self.images)

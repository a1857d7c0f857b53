"""Real processes for the tests of procfs: small Python programs that say when they are ready."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from gpuckpt.system import procfs

PRELUDE = """
import os, sys, time, socket, mmap, threading, fcntl, ctypes, struct
DIR = os.environ['TEST_DIR']
def ready(name='ready'):
    open(os.path.join(DIR, name), 'w').close()
def forever():
    while True:
        time.sleep(60)
"""


def wait_until(condition, what, seconds=30.0):
    """Wait for a condition that must come true; the limit only ends a broken test."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"never happened: {what}")
        time.sleep(0.01)


class Programs:
    """Starts programs, each in a session of its own, and ends what it started."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.children: list[subprocess.Popen] = []

    def start(self, code: str, *, arguments=(), until="ready", argv0=None, **options) -> subprocess.Popen:
        mark = self.directory / until
        mark.unlink(missing_ok=True)
        options.setdefault("stdin", subprocess.DEVNULL)
        options.setdefault("stdout", subprocess.DEVNULL)
        options.setdefault("start_new_session", True)
        environment = {**os.environ, "TEST_DIR": str(self.directory), **options.pop("env", {})}
        # stderr is a file, so that a failing program can be read and no pipe is held by accident.
        with (self.directory / "stderr").open("ab") as errors:
            argv = [argv0 or sys.executable, "-c", PRELUDE + code, *arguments]
            child = subprocess.Popen(
                argv, executable=sys.executable, stderr=options.pop("stderr", errors), env=environment, **options
            )
        self.children.append(child)
        wait_until(lambda: mark.exists() or child.poll() is not None, "the program is ready")
        assert child.poll() is None, (self.directory / "stderr").read_text()
        return child

    def stop(self) -> None:
        for child in self.children:
            root = procfs.process_id(child.pid)
            tree = procfs.tree_ids(root) if root and child.poll() is None else []
            for process in tree:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)
            child.wait()

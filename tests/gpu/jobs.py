"""A started workload of the matrix: its logs, its digests, its end."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import harness
from tests.gpu.rows import WORKLOADS, Row
from tests.gpu.workloads import contract

START_SECONDS = 150.0
STEP_SECONDS = 30.0
NOT_INSTALLED = re.compile(r"No module named '(torch|triton|jax|cupy|numba|pynvml)'")
CACHES = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "CUPY_CACHE_DIR", "NUMBA_CACHE_DIR")
COMPILE = 'out=$1 source=$2; shift 2; nvcc -O2 -arch=sm_90 -o "$out" "$source" && exec "$out" "$@"'

Lines = dict[str, list[str]]
"""The lines of each log, by what its name has after LOG."""


class Job:
    """One workload, started as a daemon would be; `pid` stays valid over a dump and a restore."""

    def __init__(self, row: Row, python: str, directory: Path, name: str = "job") -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.row = row
        self.twin: Job | None = None
        self.log = directory / name
        self.errors = directory / f"{name}.err"
        caches = {variable: str(directory / "caches" / variable.lower()) for variable in CACHES}
        with self.errors.open("w") as errors:
            self.process = subprocess.Popen(
                self._argv(python, directory / f"{name}.program"),
                env={**os.environ, **caches, **row.environment},
                stdin=subprocess.DEVNULL,
                stdout=errors,
                stderr=errors,
                start_new_session=True,
                cwd="/",
            )
        self.pid = self.process.pid
        self.began = time.monotonic()
        self.start_seconds: float | None = None
        threading.Thread(target=self._accompany, daemon=True).start()

    def _argv(self, python: str, binary: Path) -> list[str]:
        source, rest = WORKLOADS / self.row.program, [str(self.log), *self.row.options]
        if source.suffix == ".cu":
            return ["/bin/sh", "-c", COMPILE, "sh", str(binary), str(source), *rest]
        return [python, *self.row.launcher, str(source), *rest]

    def _accompany(self) -> None:
        """Note when the first step came, and reap it at its end, as a parent does: till then its pid is taken."""
        while self.process.poll() is None and not self.steps(self.row.logs[0]):
            time.sleep(0.05)
        if self.steps(self.row.logs[0]):
            self.start_seconds = time.monotonic() - self.began
        self.process.wait()

    def path(self, suffix: str) -> Path:
        """The log of one process of the tree."""
        return Path(f"{self.log}{suffix}")

    def lines(self) -> Lines:
        """All whole lines of all logs."""
        return {suffix: _lines(self.path(suffix)) for suffix in self.row.logs}

    def steps(self, suffix: str) -> list[list[str]]:
        """[n, VALUE] of each step in one log."""
        return [words[1:] for line in _lines(self.path(suffix)) if (words := line.split())[0] == "STEP"]

    def said(self) -> str:
        """The end of what it printed: why it failed."""
        return self.errors.read_text(errors="replace")[-1500:].strip() or "it printed nothing"

    def is_alive(self) -> bool:
        """Its first process runs."""
        return harness.alive(self.pid)

    def await_start(self) -> None:
        """Wait for three steps in every log; START_SECONDS count from its start. Skips where a module is missing."""

        def came() -> bool:
            if missing := NOT_INSTALLED.search(self.said()):
                pytest.skip(missing.group())
            assert self.is_alive(), f"{self.row.name} ended before its first steps: {self.said()}"
            return all(len(self.steps(suffix)) >= 3 for suffix in self.row.logs)

        left = START_SECONDS - (time.monotonic() - self.began)
        self._await(came, "its first steps", max(left, 1.0))

    def await_steps(self, more: int, seconds: float = STEP_SECONDS) -> None:
        """Wait for `more` steps from now in every log."""
        goals = {suffix: len(self.steps(suffix)) + more for suffix in self.row.logs}

        def came() -> bool:
            assert self.is_alive(), f"{self.row.name} has ended: {self.said()}"
            return all(len(self.steps(suffix)) >= goal for suffix, goal in goals.items())

        self._await(came, f"the steps {goals}", seconds)

    def _await(self, came: Callable[[], bool], what: str, seconds: float) -> None:
        """Fails with where the logs are, the state of its first process, and the end of what it printed."""
        deadline = time.monotonic() + seconds
        while not came():
            if time.monotonic() > deadline:
                at = {suffix: len(self.steps(suffix)) for suffix in self.row.logs}
                raise AssertionError(
                    f"{self.row.name}: never came within {seconds:.0f} s: {what}; it is at {at}, "
                    f"state {harness.state(self.pid)}: {self.said()}"
                )
            time.sleep(0.02)

    def digests(self, seconds: float = 60.0) -> dict[str, str]:
        """What each process of the tree with a log says of its constant memory."""
        asked = {suffix: len(self._told(suffix)) for suffix in self.row.logs}
        for suffix in asked:
            Path(f"{self.path(suffix)}.ask").touch()

        def came() -> bool:
            assert self.is_alive(), f"{self.row.name} has ended: {self.said()}"
            return all(len(self._told(suffix)) > count for suffix, count in asked.items())

        self._await(came, "its digests", seconds)
        return {suffix: self._told(suffix)[-1] for suffix in asked}

    def _told(self, suffix: str) -> list[str]:
        return [line.split()[1] for line in _lines(self.path(suffix)) if line.startswith("DIGEST ")]

    def assert_whole(self) -> None:
        """No step lost or repeated, each value follows from the one before, or is the twin's."""
        for suffix in self.row.logs:
            steps = self.steps(suffix)
            numbers = [int(number) for number, _ in steps]
            assert numbers == list(range(1, len(numbers) + 1)), f"{self.path(suffix)}: {numbers[-20:]}"
            if self.twin is None:
                self._assert_rule(suffix, [int(value) for _, value in steps])
            else:
                self._assert_as_twin(suffix, steps)

    def _assert_rule(self, suffix: str, values: list[int]) -> None:
        words = next(int(line.split()[1]) for line in _lines(self.path(suffix)) if line.startswith("RULE "))
        for number, (before, after) in enumerate(itertools.pairwise(values), start=2):
            assert after == contract.follows(before, words), (
                f"{self.path(suffix)}: step {number} does not follow from the one before: {before} -> {after}"
            )

    def _assert_as_twin(self, suffix: str, steps: list[list[str]]) -> None:
        """The twin started with it and never stood still, so it is ahead; where it was slower, it is waited for."""
        assert self.twin is not None
        harness.wait_for(
            lambda: not self.twin.is_alive() or len(self.twin.steps(suffix)) >= len(steps), "the twin's steps"
        )
        its = self.twin.steps(suffix)
        assert len(its) >= len(steps), f"the twin has ended: {self.twin.said()}"
        for one, other in zip(steps, its, strict=False):
            assert one == other, f"step {one[0]} is {one[1]}, uninterrupted it is {other[1]}"

    def pids(self) -> list[int]:
        """Its living processes: its descendants (torchrun's ranks have sessions of their own), and all of its session."""
        seen = {int(name): _parent_and_session(name) for name in os.listdir("/proc") if name.isdecimal()}
        ours = {pid for pid, (_, session) in seen.items() if session == self.pid}
        while more := {pid for pid, (parent, _) in seen.items() if parent in ours and pid not in ours}:
            ours |= more
        return sorted(filter(harness.alive, ours))

    def end(self) -> None:
        """End all of it, first kindly: a killed CUDA process leaves its memory to be cleared by the driver."""
        everything = self.pids()
        for number, seconds in ((signal.SIGTERM, 5.0), (signal.SIGKILL, 15.0)):
            for pid in everything:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
            with contextlib.suppress(AssertionError):
                harness.wait_for(lambda: not any(map(harness.alive, everything)), "its end", seconds)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(5)
        if self.twin is not None:
            self.twin.end()


def start(row: Row, python: str, directory: Path) -> Job:
    """A job, and its twin where it has one."""
    job = Job(row, python, directory)
    if row.twin:
        job.twin = Job(row, python, directory, "twin")
    return job


def why_not(row: Row, gpus: int) -> str:
    """Why a row cannot be started on this host; '' where it can."""
    if row.gpus > gpus:
        return f"needs {row.gpus} GPUs, here is {gpus}"
    if row.program.endswith(".cu") and shutil.which("nvcc") is None:
        return "needs nvcc"
    return ""


def _lines(path: Path) -> list[str]:
    """Whole lines that are not empty."""
    try:
        text = path.read_text()
    except OSError:
        return []
    return [line for line in text[: text.rfind("\n") + 1].splitlines() if line.strip()]


def _parent_and_session(pid: str) -> tuple[int, int]:
    """(0, 0) for one that is gone."""
    try:
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return int(words[1]), int(words[3])
    except (OSError, IndexError, ValueError):
        return 0, 0

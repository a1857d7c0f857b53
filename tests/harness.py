"""Running the real gpuckpt on real programs: what the end-to-end and fault tests share."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

PROGRAMS = Path(__file__).parent / "programs"
CRIU_PLACES = ("/usr/local/sbin/criu", "/usr/sbin/criu", "/opt/gpuckpt/criu/bin/criu")
PATIENCE_SECONDS = 60.0


def criu_or_reason() -> tuple[str | None, str]:
    """The CRIU of this machine, or why tests that need it are skipped."""
    if os.geteuid() != 0:
        return None, "needs root"
    for place in (os.environ.get("GPUCKPT_CRIU"), shutil.which("criu"), *CRIU_PLACES):
        if place and Path(place).exists():
            done = subprocess.run([place, "check"], capture_output=True, timeout=60)
            if done.returncode == 0:
                return place, ""
    return None, "no CRIU that passes `criu check` (make setup brings one)"


def slow_criu(place: Path, verb: str, seconds: float) -> dict[str, str]:
    """The environment for a CRIU that begins VERB only after so many seconds: a limit passes first on any machine."""
    criu, _ = criu_or_reason()
    program = place / "slow-criu"
    program.write_text(f'#!/bin/sh\n[ "$1" = {verb} ] && sleep {seconds}\nexec {criu} "$@"\n')
    program.chmod(0o755)
    return {"GPUCKPT_CRIU": str(program)}


@dataclass
class Answer:
    """What one gpuckpt run said."""

    status: int
    report: dict
    stderr: str

    @property
    def error(self) -> dict:
        """The error of the envelope."""
        return self.report["error"] or {}

    @property
    def finding_ids(self) -> set[str]:
        """Checks that did not pass."""
        return {finding["id"] for finding in self.report["findings"] if finding["verdict"] != "pass"}


def gpuckpt(*arguments: object, env: dict[str, str] | None = None, timeout: float = 120.0, **popen) -> Answer:
    """Run gpuckpt with --json to its end."""
    argv = [sys.executable, "-m", "gpuckpt", *map(str, arguments), "--json"]
    popen.setdefault("stdin", subprocess.DEVNULL)
    done = subprocess.run(
        argv, capture_output=True, text=True, timeout=timeout, env={**os.environ, **(env or {})}, **popen
    )
    try:
        report = json.loads(done.stdout)
    except ValueError:
        raise AssertionError(
            f"no envelope on stdout, status {done.returncode}: {done.stdout!r} {done.stderr}"
        ) from None
    return Answer(done.returncode, report, done.stderr)


def start_gpuckpt(*arguments: object, env: dict[str, str] | None = None, **popen) -> subprocess.Popen:
    """Start gpuckpt with --json and do not wait."""
    argv = [sys.executable, "-m", "gpuckpt", *map(str, arguments), "--json"]
    defaults = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(argv, env={**os.environ, **(env or {})}, **{**defaults, **popen})


class Jobs:
    """Programs that a test started, or that gpuckpt restored for it; all of them end with the test."""

    def __init__(self) -> None:
        self._children: list[subprocess.Popen] = []
        self._pids: set[int] = set()

    def start(self, *argv: object, **popen) -> subprocess.Popen:
        """Start a program as a cron job or daemon would be: own session, nothing on its standard streams."""
        defaults = {
            "stdin": subprocess.DEVNULL,
            "stdout": subprocess.DEVNULL,
            "stderr": subprocess.DEVNULL,
            "start_new_session": True,
        }
        child = subprocess.Popen([*map(str, argv)], **{**defaults, **popen})
        self._children.append(child)
        self._pids.add(child.pid)
        return child

    def python(self, program: str, *arguments: object, **popen) -> subprocess.Popen:
        """Start tests/programs/PROGRAM with the Python of the tests."""
        return self.start(sys.executable, PROGRAMS / program, *arguments, **popen)

    def adopt(self, *pids: int) -> None:
        """Processes (restored ones) that must end with the test too."""
        self._pids.update(pids)

    def reap(self) -> None:
        """Collect ended children, as any parent does."""
        for child in self._children:
            child.poll()

    def end(self) -> None:
        """SIGKILL everything, bounded."""
        for pid in self._pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        deadline = time.monotonic() + 10
        while any(alive(pid) for pid in self._pids) and time.monotonic() < deadline:
            self.reap()
            time.sleep(0.02)
        for child in self._children:
            self._put_away(child)

    @staticmethod
    def _put_away(child: subprocess.Popen) -> None:
        """Reap it and close its pipes: what the collector finds open later fails some other test."""
        child.wait(10)
        for pipe in (child.stdin, child.stdout, child.stderr):
            if pipe is not None:
                pipe.close()

    def own(self, child: subprocess.Popen) -> subprocess.Popen:
        """A program that was started elsewhere, to be ended and put away with the others."""
        self._children.append(child)
        self._pids.add(child.pid)
        return child


def alive(pid: int) -> bool:
    """The process exists and is no zombie."""
    return state(pid) not in ("", "Z", "X")


def state(pid: int) -> str:
    """The letter of /proc/PID/stat; '' when there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def resident(pid: int) -> int:
    """Bytes of a process, what it shares with others divided among them."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:")), 0)


def wait_for(condition, what: str, seconds: float = PATIENCE_SECONDS):
    """Poll until `condition()` is true and return its value; fail with `what` otherwise."""
    deadline = time.monotonic() + seconds
    while True:
        value = condition()
        if value:
            return value
        assert time.monotonic() < deadline, f"never happened: {what}"
        time.sleep(0.02)


def numbers(log: Path) -> list[int]:
    """The rising numbers a counter program wrote: the first token of each line that is one."""
    tokens = (line.split()[0] for line in log.read_text().splitlines() if line.split())
    return [int(token) for token in tokens if token.isdigit()]


def wait_for_count(log: Path, more_than: int) -> int:
    """Wait until a counter has come past a number; returns its last number."""
    return wait_for(
        lambda: (seen := numbers(log) if log.exists() else []) and seen[-1] > more_than and seen[-1],
        f"{log} > {more_than}",
    )


def assert_gapless(log: Path) -> None:
    """No number is missing, none stands twice."""
    seen = numbers(log)
    assert seen == list(range(seen[0], seen[0] + len(seen))), f"gap or repeat in {log}: {seen[-50:]}"

"""What the fault tests share: a job that shows it is unharmed, and kills at chosen moments.

The test process is the subreaper of everything below it (prctl), so that a job that was restored, or an
owner whose main was killed, becomes its child: it can be waited for and nothing outlives the tests.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from gpuckpt.owner import runs
from tests import harness
from tests.harness import Answer, gpuckpt, start_gpuckpt, wait_for

HERE = Path(__file__).parent
RUNS = Path("/run/gpuckpt/runs")
PR_SET_CHILD_SUBREAPER = 36
SETTLE = ("--settle", 0.2)


def become_subreaper(on: bool = True) -> None:
    """Orphans below this process become its children, not init's."""
    assert ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, int(on), 0, 0, 0) == 0


def children(pid: int) -> list[int]:
    """Children of all threads of a process; none once it has ended."""
    found = []
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):
                found += [int(child) for child in (task / "children").read_text().split()]
    return found


def descendants(pid: int) -> list[int]:
    """Everything below a process that is no zombie."""
    found = []
    for child in children(pid):
        found += [child, *descendants(child)]
    return [one for one in found if harness.alive(one)]


def command_of(pid: int) -> str:
    """The command line of a process, '' when it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
    except OSError:
        return ""


def owner_of(main: int) -> int | None:
    """The owner that a main process has started."""
    return next((pid for pid in children(main) if "gpuckpt.owner.process" in command_of(pid)), None)


def criu_of(owner: int | None) -> int | None:
    """The CRIU (dump or restore) that an owner has started."""
    if owner is None:
        return None
    return next((pid for pid in children(owner) if "--action-script" in command_of(pid)), None)


def runs_of(*pids: int) -> list[Path]:
    """Run directories that name one of these pids: other tests may run at the same time."""
    found = []
    for directory in RUNS.glob("*"):
        with contextlib.suppress(OSError, ValueError):
            card = json.loads((directory / "run.json").read_text())
            if {pid for pid, _ in card["ids"]} & set(pids):
                found.append(directory)
    return found


def cleared_away(*pids: int) -> bool:
    """Whether no run on these pids is left, nor anything that the next run would not settle by itself.

    A main that is killed after its owner has ended, before it took away their directory, leaves that to the next run.
    """
    if any(runs.is_locked(directory / "lock") for directory in runs_of(*pids)):
        return False
    runs.leftovers_of([])
    return not runs_of(*pids)


def run_of_main(main: int) -> Path | None:
    """The run directory of a main process."""
    for directory in RUNS.glob("*"):
        with contextlib.suppress(OSError, ValueError):
            if json.loads((directory / "run.json").read_text())["pid"] == main:
                return directory
    return None


def journal_has(main: int, act: str) -> bool:
    """Whether the run of a main process has written this act down."""
    directory = run_of_main(main)
    with contextlib.suppress(OSError):
        return directory is not None and f'"act": "{act}"' in (directory / "journal").read_text()
    return False


def kill(pid: int | None) -> bool:
    """SIGKILL; False when there is no such process."""
    if pid is None:
        return False
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


@dataclass
class Job:
    """The paired counter of one test, through its dumps and restores."""

    log: Path
    pids: tuple[int, ...] = ()
    _reaping: bool = True
    _known: set[int] = field(default_factory=set)

    @classmethod
    def start(cls, directory: Path, megabytes: int = 1, *more: object) -> Job:
        """Start it as a daemon would be: own session, nothing on its standard streams."""
        job = cls(directory / "log")
        argv = [sys.executable, "-E", "-S", str(HERE / "paired_counter.py"), str(job.log), str(megabytes)]
        argv += map(str, more)
        actions = [(os.POSIX_SPAWN_OPEN, number, "/dev/null", os.O_RDWR, 0) for number in range(3)]
        # Not subprocess: after a restore the same pid is this process's child again, and must be reaped again.
        root = os.posix_spawn(sys.executable, argv, {}, file_actions=actions, setsid=True)
        job._known.add(root)
        threading.Thread(target=job._reap_for_ever, daemon=True).start()
        harness.wait_for_count(job.log, 2)
        job.pids = (root, *children(root))
        job._known.update(job.pids)
        assert len(job.pids) == 2
        return job

    @property
    def root(self) -> int:
        """Its root's pid, before and after every restore."""
        return self.pids[0]

    def _reap_for_ever(self) -> None:
        while self._reaping:
            for pid in list(self._known):
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)
            time.sleep(0.01)

    @property
    def alive(self) -> list[int]:
        """Its processes that live."""
        return [pid for pid in self.pids if harness.alive(pid)]

    def last(self) -> int:
        """The last number in its log."""
        return harness.numbers(self.log)[-1]

    def assert_goes_on(self, *, repeats: bool = False) -> None:
        """Both processes run, nothing holds or traces them, the connection lives, no number was lost.

        With `repeats` a number may stand twice: the job ran on for a moment after its image.
        """
        now = self.last()
        wait_for(lambda: self.last() > now + 2, f"the counter rises: {self.describe()}", 30)
        assert self.alive == list(self.pids), self.describe()
        for pid in self.pids:
            assert harness.state(pid) not in ("T", "t"), self.describe()
            assert "TracerPid:\t0\n" in Path(f"/proc/{pid}/status").read_text(), self.describe()
        if repeats:
            seen = set(harness.numbers(self.log))
            assert seen == set(range(min(seen), max(seen) + 1)), f"gap in {self.log}"
        else:
            harness.assert_gapless(self.log)

    def describe(self) -> str:
        """For a failed assertion: what its processes are."""
        return ", ".join(f"{pid} {harness.state(pid) or 'gone'} {command_of(pid)[:60]}" for pid in self.pids)

    def kill(self) -> None:
        """End it."""
        for pid in self.pids:
            kill(pid)
        wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in self.pids), "the job is gone", 10)

    def end(self) -> None:
        """End it for good."""
        self.kill()
        self._reaping = False


def wait_quiet(job: Job) -> None:
    """Wait until everything that gpuckpt left below us has ended: an owner that unwinds, a CRIU that undoes."""

    def busy() -> list[str]:
        # A restored job is somebody's child too, and it stays.
        return [command_of(pid) for pid in descendants(os.getpid()) if pid not in job.pids and _is_ours(pid)]

    wait_for(lambda: not busy(), f"gpuckpt's processes end: {busy()}", 60)


def _is_ours(pid: int) -> bool:
    words = command_of(pid)
    return any(word in words for word in ("gpuckpt", "--action-script"))


class Shot:
    """One gpuckpt run during which something is killed, or a signal sent, at a moment."""

    def __init__(self, *arguments: object, **popen: object) -> None:
        self.main = start_gpuckpt(*arguments, **popen)
        self.began = time.monotonic()
        self.hit = False
        self._answer: list[tuple[str, str]] = []
        # Read meanwhile: a full pipe must not be what ends the run.
        self._reader = threading.Thread(target=lambda: self._answer.append(self.main.communicate()), daemon=True)
        self._reader.start()

    @property
    def running(self) -> bool:
        """Main has not ended, not even as a zombie."""
        return harness.alive(self.main.pid)

    def until(self, condition: Callable[[], object], seconds: float = 60.0) -> bool:
        """Wait for a moment, finely; False when main ended before it came."""
        deadline = time.monotonic() + seconds
        while self.running and time.monotonic() < deadline:
            if condition():
                return True
            time.sleep(0.0005)
        return False

    def until_seconds(self, seconds: float, since: float | None = None) -> bool:
        """Wait until `seconds` have passed since the start."""
        return self.until(lambda: time.monotonic() - (since or self.began) >= seconds)

    def answer(self) -> Answer | None:
        """What main said; None when it was killed before it could."""
        self._reader.join(120)
        stdout, stderr = self._answer[0]
        try:
            return Answer(self.main.returncode, json.loads(stdout), stderr)
        except ValueError:
            return None


def undisturbed(job: Job, *arguments: object) -> tuple[float, float]:
    """Seconds of a whole run, and seconds from the owner's start to the end."""
    shot = Shot(*arguments)
    shot.until(lambda: owner_of(shot.main.pid) is not None)
    owner_at = time.monotonic()
    answer = shot.answer()
    ended = time.monotonic()
    assert answer is not None and answer.status == 0, answer and answer.error
    return ended - shot.began, ended - owner_at


def remove_images(directory: Path) -> None:
    """Images and what killed dumps left of them."""
    for path in directory.glob("img*"):
        shutil.rmtree(path)


def dump_and_wait(job: Job, image: Path, *options: object) -> Answer:
    """An undisturbed dump that must work."""
    answer = gpuckpt("dump", "--tree", job.root, image, *SETTLE, *options)
    assert answer.status == 0, (answer.status, answer.error, answer.stderr)
    return answer


def restore_and_wait(job: Job, image: Path, *options: object) -> Answer:
    """A restore that must work."""
    answer = gpuckpt("restore", image, *SETTLE, *options)
    assert answer.status == 0, (answer.status, answer.error, answer.stderr)
    return answer


def rounds(seed: int, count: int) -> Iterator[tuple[int, random.Random]]:
    """Numbered rounds with one fixed seed for all of them."""
    rng = random.Random(seed)
    for number in range(count):
        yield number, rng


def run_as(uid: int) -> dict[str, object]:
    """Popen's arguments for another user without groups."""
    return {"user": uid, "group": uid, "extra_groups": []}


def call(*argv: object, **options: object) -> subprocess.CompletedProcess[str]:
    """Run a system program that must work."""
    return subprocess.run([*map(str, argv)], check=True, capture_output=True, text=True, timeout=60, **options)  # type: ignore[call-overload]

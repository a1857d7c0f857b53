"""One PyTorch process for many tests: a start costs ten seconds, and what goes on after all of them proves more."""

from __future__ import annotations

import contextlib
import json
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

from tests import harness
from tests.faults import arena
from tests.harness import Answer

GIB = 1.0
BUSY_SECONDS = 0.3
"""The length of its kernels: a lock waits for one, so that a kill or a Ctrl-C can meet it there."""
PATIENCE_SECONDS = 150.0
TAIL = 3000
RECENT_SECONDS = 120


class Survivors:
    """Gives the process of the test before, or a new one where that test has not left it running."""

    def __init__(self, start: Callable[..., Any]) -> None:
        self._start = start
        self._job: Any = None

    def fit(self) -> Any:
        """A job that runs, that no run of gpuckpt has to do with, and that no test has failed with."""
        if self._job is None or not _is_well(self._job):
            self.spoil()
            self._job = self._start(GIB, "--graph", "--busy", str(BUSY_SECONDS))
            # Reaped as by any parent: a dump that ends it waits three seconds for that.
            threading.Thread(target=self._job.process.wait, daemon=True).start()
        return self._job

    def spoil(self) -> None:
        """A test has failed with it: the next one gets another."""
        if self._job is not None:
            self._job.end()
            self._job = None


def _is_well(job: Any) -> bool:
    with contextlib.suppress(AssertionError, IndexError):
        job.wait_past(job.steps()[-1], 10)
        return not arena.runs_of(job.pid)
    return False


def gpuckpt(*arguments: object) -> Answer:
    """Run it to its end; all it says is printed, for the log of a failed test."""
    answer = harness.gpuckpt(*arguments, timeout=PATIENCE_SECONDS)
    _tell(arguments, answer)
    return answer


class Shot(arena.Shot):
    """As in the arena; all it says is printed."""

    def __init__(self, *arguments: object, **popen: object) -> None:
        super().__init__(*arguments, **popen)
        self._arguments = arguments

    def until_act(self, act: str) -> None:
        """Wait until the journal of its run says that this has begun."""
        came = self.until(lambda: arena.journal_has(self.main.pid, act))
        assert came, f"its journal never said {act}: {self.answer()}"

    def answer(self) -> Answer | None:
        """What main said; None when it was killed before it could."""
        answer = super().answer()
        _tell(self._arguments, answer)
        return answer

    def whole_answer(self) -> Answer:
        """What main said, which nobody has killed."""
        answer = self.answer()
        assert answer is not None, f"no words, status {self.main.returncode}"
        return answer


def _tell(arguments: tuple[object, ...], answer: Answer | None) -> None:
    print("$ gpuckpt", *arguments)
    if answer is not None:
        print(answer.status, json.dumps(answer.report)[: 2 * TAIL], answer.stderr[-TAIL:], sep="\n")


def evidence(job: Any) -> str:
    """Why a test has failed, as far as it can be seen afterwards: the job, and what gpuckpt's runs have written down."""
    parts = [f"job {job.pid}: state {harness.state(job.pid) or 'gone'}, its last lines {job.lines()[-3:]}"]
    places = [job.errors, *arena.RUNS.glob("*/journal"), *_recent(Path("/run/gpuckpt/failed").glob("*"))]
    for place in places:
        with contextlib.suppress(OSError):
            parts.append(f"--- {place}\n{place.read_bytes().replace(bytes(1), b'')[-TAIL:].decode(errors='replace')}")
    return "\n".join(parts)


def _recent(paths: Iterator[Path]) -> list[Path]:
    since = time.time() - RECENT_SECONDS
    return [path for path in paths if path.is_file() and path.stat().st_mtime > since]


def wait_free(job: Any) -> None:
    """A restore finds its pid free."""
    harness.wait_for(lambda: not Path(f"/proc/{job.pid}").exists(), f"pid {job.pid} is free: {harness.state(job.pid)}")


def dump_and_end(job: Any, image: Path) -> None:
    """An image of the job, which has ended with it."""
    dumped = gpuckpt("dump", "--tree", job.pid, image)
    assert (dumped.status, dumped.report["process"]) == (0, "ended"), dumped
    wait_free(job)


def restore(job: Any, image: Path) -> None:
    """The job runs again."""
    restored = gpuckpt("restore", image, "--settle", 0.2)
    assert (restored.status, restored.report["process"]) == (0, "restored"), restored
    job.wait_past(job.steps()[-1])


def assert_unharmed(job: Any, checksums: list[str]) -> None:
    """It goes on: all of its GPU memory is as it was, and no step is lost or repeated."""
    job.wait_past(job.steps()[-1] + 1)
    assert job.checksums() == checksums
    job.assert_no_step_lost()


class Hog:
    """A started gpu_hog.py: another process that has the memory of the GPU."""

    def __init__(self, python: str, program: Path, errors: Path) -> None:
        self._errors = errors
        with errors.open("w") as stderr:
            self.process = subprocess.Popen(
                [python, str(program)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                start_new_session=True,
                cwd="/",
            )
        self._said: list[str] = []
        threading.Thread(target=self._listen, args=(self.process.stdout,), daemon=True).start()

    def _listen(self, stdout: TextIO) -> None:
        with contextlib.suppress(ValueError):
            self._said.extend(iter(stdout.readline, ""))

    def ask(self, what: str, amount: int) -> None:
        """'leave' or 'pounce', and how many bytes; `await_answer` waits for it."""
        assert self.process.stdin is not None
        self._said.clear()
        self.process.stdin.write(f"{what} {amount}\n")
        self.process.stdin.flush()

    def await_answer(self, word: str, seconds: float) -> int:
        """Wait for 'ready' or 'taken'; bytes that are free then."""
        deadline = time.monotonic() + seconds
        while not any(line.startswith(word) for line in self._said):
            assert self.process.poll() is None, f"the hog has ended: {self._errors.read_text()[-TAIL:]}"
            assert time.monotonic() < deadline, f"the hog never said {word}: {self._errors.read_text()[-TAIL:]}"
            time.sleep(0.005)
        return int(self._said[-1].split()[1])

    def end(self) -> None:
        """End it: its memory is free then."""
        self.process.kill()
        self.process.wait(60)
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError, ValueError):
                    pipe.close()

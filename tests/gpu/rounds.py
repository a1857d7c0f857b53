"""What one row of the matrix goes through: saved, ended, brought back and judged; or refused and unharmed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from tests import harness
from tests.gpu.jobs import Job
from tests.harness import Answer, gpuckpt

PATIENCE_SECONDS = 120.0
GRACE_SECONDS = 10.0
"""gpuckpt's own limit is so much shorter: it undoes what it began before it is killed."""

PLAIN_SECONDS = 200.0
PROCEDURE = Path(__file__).parent / "plainprocedure.py"

Figures = dict[str, Any]


def run(verb: str, *arguments: object, patience: float = PATIENCE_SECONDS) -> tuple[Answer, float]:
    """gpuckpt under a limit, and its wall time."""
    began = time.monotonic()
    try:
        answer = gpuckpt(verb, *arguments, "--timeout", patience - GRACE_SECONDS, timeout=patience)
    except subprocess.TimeoutExpired as late:
        raise AssertionError(f"gpuckpt {verb} did not end within {patience:g} s: {late.stderr!r}") from None
    return answer, time.monotonic() - began


def explain(answer: Answer) -> str:
    """Why gpuckpt did not do it: status, error, the checks that failed, the end of its stderr."""
    failing = [finding for finding in answer.report["findings"] if finding["verdict"] != "pass"]
    blocking = [f"{f['id']}: {f['found']}" for f in failing if f["severity"] == "block"]
    said = {"status": answer.status, "process": answer.report["process"], "error": answer.error, "checks": blocking}
    return f"{json.dumps(said)}\n{answer.stderr[-1500:]}"


def dump(job: Job, image: Path, figures: Figures, *options: object, patience: float = PATIENCE_SECONDS) -> None:
    """Save it; it has ended, and its pids are free."""
    pids = job.pids()
    answer, wall = run("dump", "--tree", job.pid, image, *job.row.dump_options, *options, patience=patience)
    assert (answer.status, answer.report["process"]) == (0, "ended"), f"dump: {explain(answer)}"
    data = answer.report["data"]
    figures |= {
        "processes": len(data["pids"]),
        "raw_bytes": data["bytes_raw"],
        "stored_bytes": data["bytes_stored"],
        "dump_seconds": data["seconds"],
        "frozen_seconds": data["frozen_seconds"],
        "dump_wall_seconds": wall,
        "notes": data.get("notes", []),
    }
    await_gone(pids)


def await_gone(pids: list[int]) -> None:
    """The pids of an ended tree are free."""
    harness.wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), f"the pids {pids} are free", 30)


def restore(job: Job, image: Path, figures: Figures, *options: object, patience: float = PATIENCE_SECONDS) -> None:
    """Bring it back, and see it step on; `running_seconds` is from the command's start to the first new step."""
    watch = FirstStep(job)
    asked = ["--settle", 0.2, *job.row.restore_options, *options]
    if job.row.health:
        asked += ["--ready-http", f"http://127.0.0.1:{Path(f'{job.log}.port').read_text()}{job.row.health}"]
    answer, wall = run("restore", image, *asked, patience=patience)
    assert (answer.status, answer.report["process"]) == (0, "restored"), f"restore: {explain(answer)}"
    data = answer.report["data"]
    figures |= {
        "restore_seconds": data["seconds"],
        "restore_wall_seconds": wall,
        "running_seconds": watch.seconds(),
        "bytes_injected": data.get("bytes_injected"),
        "bytes_filled": data.get("bytes_filled"),
        "gpu_memory_bytes": sum(value or 0 for value in data.get("gpu_memory_bytes", {}).values()),
    }
    figures["notes"] = [*figures.get("notes", []), *data.get("notes", [])]


class FirstStep:
    """How long from now until a log has a further step, looked at while something else goes on."""

    def __init__(self, job: Job, patience: float = 2 * PATIENCE_SECONDS) -> None:
        self._job, self._suffix = job, job.row.logs[0]
        self._count = len(job.steps(self._suffix))
        self._began = time.monotonic()
        self._deadline = self._began + patience
        self._found: float | None = None
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def _look(self) -> None:
        """Bounded: nobody may come to ask, where the restore fails."""
        while time.monotonic() < self._deadline:
            if len(self._job.steps(self._suffix)) > self._count:
                self._found = time.monotonic() - self._began
                return
            time.sleep(0.01)

    def seconds(self, patience: float = 60.0) -> float:
        """Waits for it; fails where it does not come."""
        self._thread.join(patience)
        assert self._found is not None, f"restored, but no step within {patience:g} s: {self._job.said()}"
        return self._found


def round_trip(job: Job, image: Path, figures: Figures, *options: str, patience: float = PATIENCE_SECONDS) -> None:
    """Dump, end, restore: every line from before is still there, and what comes follows from it; digests are equal.

    `options` go to both verbs.
    """
    digests = job.digests()
    job.await_steps(2)
    figures["gpu_mappings"] = gpu_mappings(job.pids())
    dump(job, image, figures, *options, patience=patience)
    before = job.lines()
    restore(job, image, figures, *options, patience=patience)
    job.await_steps(5)
    after = job.lines()
    for suffix, lines in before.items():
        assert after[suffix][: len(lines)] == lines, f"{job.path(suffix)} was changed by the restore"
    now = job.digests()
    assert now == digests, f"memory differs after the restore: {digests} -> {now}"
    job.assert_whole()


def plain_round(job: Job, directory: Path) -> dict[str, Any]:
    """The plain procedure on the same process, held to the same standard."""
    digests, pids = job.digests(), job.pids()
    began = time.monotonic()
    figures: dict[str, Any] = {"dump_seconds": plain("dump", job.pid, directory)}
    figures["dump_wall_seconds"] = time.monotonic() - began
    await_gone(pids)
    figures["stored_bytes"] = sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())
    watch = FirstStep(job)
    began = time.monotonic()
    figures["restore_seconds"] = plain("restore", job.pid, directory)
    figures["restore_wall_seconds"] = time.monotonic() - began
    figures["running_seconds"] = watch.seconds()
    job.await_steps(5)
    assert job.digests() == digests
    job.assert_whole()
    return figures


def plain(verb: str, pid: int, directory: Path) -> dict[str, float]:
    """One half of it; the seconds by phase."""
    criu, why = harness.criu_or_reason()
    assert criu is not None, why
    argv = [sys.executable, str(PROCEDURE), verb, str(pid), str(directory), "--criu", criu]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=PLAIN_SECONDS)
    assert done.returncode == 0, f"plain procedure, {verb}: {done.stdout}{done.stderr[-1500:]}"
    return json.loads(done.stdout)


def refused(job: Job, image: Path, figures: Figures, *options: str) -> str:
    """A dump that must not happen, and the job unharmed; what was said."""
    refusal = job.row.refused
    assert refusal is not None
    digests = job.digests()
    figures["gpu_mappings"] = gpu_mappings(job.pids())
    answer, wall = run("dump", "--tree", job.pid, image, *job.row.dump_options, *options)
    figures["dump_wall_seconds"] = wall
    if answer.status == 0 and "--dry-run" not in options:
        raise AssertionError(f"the dump was not refused; {_what_came_of_it(job, image, figures, digests)}")
    assert (answer.status, answer.report["process"]) == (20, "untouched"), f"not refused: {explain(answer)}"
    failed = [f for f in answer.report["findings"] if f["verdict"] == "fail" and f["severity"] == "block"]
    assert {finding["id"] for finding in failed} & set(refusal.checks), f"by another check: {explain(answer)}"
    told = json.dumps([answer.error, failed])
    for word in refusal.words:
        assert word in told, f"{word!r} is not said: {told}"
    assert not list(image.parent.glob(f"{image.name}*")), "something was left of the image"
    job.await_steps(5)
    assert job.digests() == digests, "the job's memory has changed"
    job.assert_whole()
    return str(answer.error["message"])


def _what_came_of_it(job: Job, image: Path, figures: Figures, digests: dict[str, str]) -> str:
    """A dump that should have been refused succeeded: whether its image is any good."""
    try:
        await_gone(job.pids())
        restore(job, image, figures)
        job.await_steps(5)
        equal = job.digests() == digests
        job.assert_whole()
    except AssertionError as failure:
        return f"the image does not bring it back: {failure}"
    return f"the image brought it back, digests {'equal' if equal else 'DIFFERENT'}, values right"


def warm(place: Path, gib: int) -> None:
    """Write as much as an image will hold, and remove it: a tmpfs on memory that the host has to find first is slow."""
    piece = os.urandom(64 << 20)
    with (place / "warm").open("wb") as file:
        for _ in range(gib * 16):
            file.write(piece)
    (place / "warm").unlink()


def remove(*images: Path) -> None:
    """Images of rows that are done: tmpfs is memory, and the next row needs it."""
    for image in images:
        for path in image.parent.glob(f"{image.name}*"):
            shutil.rmtree(path, ignore_errors=True)


def gpu_mappings(pids: list[int]) -> dict[str, list[int]]:
    """How many mappings of each of NVIDIA's device files a tree has, and their bytes together, before it is dumped."""
    found: dict[str, list[int]] = {}
    for pid in pids:
        try:
            lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
        except OSError:
            continue
        for line in lines:
            span, path = line.split()[0], line.split()[-1]
            if path.startswith("/dev/nvidia"):
                first, last = (int(end, 16) for end in span.split("-"))
                entry = found.setdefault(path, [0, 0])
                entry[0] += 1
                entry[1] += last - first
    return found

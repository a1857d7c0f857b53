"""A round of dump and restore, as nearly every test here needs it: with what was said when it went wrong."""

from __future__ import annotations

import contextlib
import json
import threading
from pathlib import Path

from tests import harness
from tests.harness import Answer, Jobs, gpuckpt

SETTLE = ("--settle", 0.2)


def descendants(root: int) -> list[int]:
    """The tree of a process, itself first."""
    found = [root]
    for pid in found:
        for children in Path(f"/proc/{pid}/task").glob("*/children"):
            try:
                found += [int(child) for child in children.read_text().split()]
            except OSError:
                continue
    return found


def dump(jobs: Jobs, root: int, image: Path, *options: object, **how) -> Answer:
    """A dump that must work; the tree ends with the test."""
    jobs.adopt(*descendants(root))
    with reaping(jobs):
        answer = gpuckpt("dump", "--tree", root, image, *options, *SETTLE, **how)
    assert (answer.status, answer.report["outcome"]) == (0, "ok"), explain(answer)
    if "--leave-running" not in options:
        await_end(jobs, answer.report["data"]["pids"])
    return answer


@contextlib.contextmanager
def reaping(jobs: Jobs):
    """Reap what ends meanwhile, as any parent does: a dump waits a while for its tree to leave /proc."""
    over = threading.Event()

    def reap() -> None:
        while not over.wait(0.02):
            jobs.reap()

    reaper = threading.Thread(target=reap)
    reaper.start()
    try:
        yield
    finally:
        over.set()
        reaper.join()


def restore(jobs: Jobs, image: Path, *options: object, **how) -> Answer:
    """A restore that must work; what it brings back ends with the test."""
    answer = gpuckpt("restore", image, *options, *SETTLE, **how)
    jobs.adopt(*answer.report["data"].get("pids", ()))
    assert (answer.status, answer.report["outcome"], answer.report["process"]) == (0, "ok", "restored"), explain(answer)
    return answer


def refused(answer: Answer) -> set[str]:
    """The checks that refused; nothing was touched."""
    assert (answer.status, answer.report["process"]) == (20, "untouched"), explain(answer)
    return {f["id"] for f in answer.report["findings"] if f["verdict"] == "fail" and f["severity"] == "block"}


def await_end(jobs: Jobs, pids: list[int]) -> None:
    """Until every process has left /proc: what the test started is reaped here, the rest by init."""

    def gone() -> bool:
        jobs.reap()
        return not any(harness.state(pid) for pid in pids)

    harness.wait_for(gone, f"{pids} leave /proc")


def goes_on(log: Path, seen: int, more: int = 5) -> None:
    """The count goes on from `seen` without a gap, and nothing was broken."""
    harness.wait_for(
        lambda: "BROKEN" in log.read_text() or harness.numbers(log)[-1] >= seen + more, f"{log} > {seen + more}"
    )
    assert "BROKEN" not in log.read_text(), log.read_text()[-500:]
    harness.assert_gapless(log)


def manifest(image: Path) -> dict:
    """The manifest as plain JSON."""
    return json.loads((image / "manifest.json").read_text())


def manifest_pids(image: Path) -> list[int]:
    """The pids of an image's tree, its root first: a restore that fails does not say them."""
    return [process["id"]["pid"] for process in manifest(image)["tree"]["processes"]]


def explain(answer: Answer) -> str:
    """What gpuckpt said, and the end of CRIU's log where it names one."""
    text = f"status {answer.status}: {answer.error}\n" + "\n".join(
        f"{f['verdict']} {f['id']}: {f['found']}" for f in answer.report["findings"] if f["verdict"] != "pass"
    )
    log = Path(str(answer.error.get("hint", "")).rpartition("CRIU's log: ")[2] or "-")
    if log.is_file():
        lines = [line for line in log.read_text("utf-8", "replace").splitlines() if "Error" in line or "Warn" in line]
        text += "\n" + "\n".join(lines[-15:])
    return f"{text}\n{answer.stderr[-2000:]}"

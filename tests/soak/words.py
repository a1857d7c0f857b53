"""What gpuckpt said, beside what is seen: and what must never be."""

from __future__ import annotations

import signal

from tests.faults.arena import Shot
from tests.harness import Answer
from tests.soak.plan import Turn

WRONGS = ("frozen", "lost", "half-restored", "dead connection", "bad image", "left behind", "untrue words")
"""What must never be: the table counts each."""


class Wrong(Exception):
    """The promise is broken: one of WRONGS, and what was seen."""

    def __init__(self, what: str, seen: str) -> None:
        super().__init__(f"{what}: {seen}")
        self.what = what
        self.seen = seen


def died_of(shot: Shot, plan: Turn) -> bool:
    """The blow itself ended main, without a word; Python, while it starts, ends with 1 at Ctrl-C."""
    python_started = "/gpuckpt/cli/" in stderr_of(shot)
    early = plan.blow.number == signal.SIGINT and shot.main.returncode == 1 and not python_started
    # A main that stands still keeps CRIU's pipes: after a while the owner ends it (owner/dumping.py).
    ended = plan.blow.number == signal.SIGSTOP and shot.main.returncode == -signal.SIGKILL
    return early or ended or shot.main.returncode in (-plan.blow.number, 128 + plan.blow.number)


def stderr_of(shot: Shot) -> str:
    """All that main wrote there."""
    return shot._answer[0][1]


def require_true_dump(answer: Answer | None, seen: str, *, complete: bool) -> None:
    """What a dump said is what is seen."""
    if answer is None:
        return
    status, process = answer.status, answer.report["process"]
    if status == 0:
        true = complete and process == ("running" if seen == "advancing" else "ended")
    else:
        true = seen == "advancing" and process in ("running", "untouched") and (status == 30 or status > 128)
    if not true:
        raise Wrong("untrue words", f"status {status}, process {process}, but {seen}, an image: {complete}")


def require_true_restore(answer: Answer | None, seen: str) -> None:
    """What a restore said is what is seen."""
    if answer is None:
        return
    status, process = answer.status, answer.report["process"]
    if seen == "advancing":
        true = process == "restored" and (status == 0 or status > 128)
    else:
        true = process == "untouched" and (status == 40 or status > 128)
    if not true:
        raise Wrong("untrue words", f"status {status}, process {process}, but {seen}: {answer.error}")

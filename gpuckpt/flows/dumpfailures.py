"""How a dump that failed is told: the cause, and what became of the tree."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING, Any

from gpuckpt.flows.conversation import seen_of, words_for_seen
from gpuckpt.flows.interruption import BrokenOff
from gpuckpt.model.errors import DumpFailed, GpuckptError, Interrupted, ProcessState, TreeHeld

if TYPE_CHECKING:
    from pathlib import Path


def cause(message: dict[str, Any], trouble: Exception | None) -> tuple[str, str]:
    """What to tell: main's own trouble where there was one, else the owner's words."""
    if isinstance(trouble, GpuckptError):
        return trouble.message, trouble.hint
    if isinstance(trouble, OSError):
        where = f" ({trouble.filename})" if trouble.filename else ""
        full = "the disk is full: " if trouble.errno in (errno.ENOSPC, errno.EDQUOT) else ""
        return (
            f"the image could not be written: {full}{trouble.strerror}{where}",
            "make room, or choose another directory",
        )
    if isinstance(trouble, BrokenOff):
        return f"broken off: {trouble.why}", ""
    return message.get("message", "the resume failed"), message.get("hint", "")


def as_interrupted(trouble: Exception | None, what: str = "the tree runs on") -> GpuckptError | None:
    """A signal as the error the user sees; None for any other trouble."""
    if isinstance(trouble, BrokenOff) and trouble.signal_number is not None:
        process: ProcessState = "running"
        return Interrupted(trouble.signal_number, f"broken off: {trouble.why}; {what}", process=process)
    return None


def nothing_touched(trouble: BrokenOff) -> GpuckptError:
    """A signal or the deadline, before anything was touched."""
    error = as_interrupted(trouble, "nothing was touched")
    return error or DumpFailed(f"broken off: {trouble.why}; the tree runs on")


def runs_on(why: str, hint: str, trouble: Exception | None, published: Path | None) -> GpuckptError:
    """The tree was seen running; where that came after the publishing, it has run on past its image."""
    kept = f"; {published} is complete and holds what it was before" if published else ""
    return as_interrupted(trouble) or DumpFailed(f"{why}; the tree runs on{kept}", hint)


def not_running(why: str, message: dict[str, Any], root: int, published: Path | None) -> GpuckptError:
    """Not everything runs: which process is what, and the command that repairs it. `root` is the tree's pid."""
    seen = words_for_seen(seen_of(message))
    if message["state"] == "gone":
        what = "part of the tree has ended" if "running" in seen else "the tree has ended"
        newest = f"{published}: it is complete" if published else "the newest image"
        return TreeHeld(f"{why}; {what}: {seen}", f"end the rest, then restore {newest}", process="gone")
    problem = f": {message['problem']}" if message.get("problem") else ""
    return TreeHeld(f"{why}; the tree does not run{problem} ({seen})", f"run `gpuckpt restore --tree {root}`")

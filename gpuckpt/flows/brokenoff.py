"""How a restore that was broken off, by a signal or the deadline, is told."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpuckpt.model.errors import GpuckptError, Interrupted, ProcessState, RestoredUnhealthy, RestoreFailed

if TYPE_CHECKING:
    from gpuckpt.flows.interruption import BrokenOff


def nothing_touched(trouble: BrokenOff) -> GpuckptError:
    """The error to raise before anything was touched."""
    return interrupted(trouble, "nothing was touched")


def interrupted(trouble: BrokenOff, what: str, *, restored: bool = False, cause: str = "") -> GpuckptError:
    """The error to raise; `cause`: what it was waiting for, where a deadline broke it off."""
    process: ProcessState = "restored" if restored else "untouched"
    if trouble.signal_number is not None:
        return Interrupted(trouble.signal_number, f"broken off: {trouble.why}; {what}", process=process)
    if restored:
        return RestoredUnhealthy(f"broken off: {trouble.why}; {what}", "look at the job yourself", process=process)
    # What a failed restore leaves is in the meaning of its status, which stands in front of this.
    return RestoreFailed(": ".join(filter(None, ("broken off", trouble.why, cause))), "give it more time")

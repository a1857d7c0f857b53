"""What a verb returns: one envelope for people and programs, and the findings of checks.

The keys and words are a contract (design: "The contract other programs rely on"): `--json` prints
exactly `Report.to_json()`.
"""

from __future__ import annotations

from dataclasses import field
from typing import Any, Literal

from gpuckpt.model.errors import GpuckptError, ProcessState, exit_status
from gpuckpt.model.records import dataclass

Verdict = Literal["pass", "fail", "unknown"]
Severity = Literal["note", "warn", "block"]
Outcome = Literal["ok", "refused", "failed", "planned", "partial"]

HOOK_PHASES = ("pre_dump", "post_dump", "pre_restore", "post_restore")
"""The user's own commands: their seconds are no part of how long gpuckpt took."""
PHASES = (
    *("lock", "gpu_to_host", "freeze", "capture", "files", "publish", "resume"),
    *("criu", "inject", "host_to_gpu", "ready", "transfer"),
    *HOOK_PHASES,
    *("judge", "prepare", "go"),
)


@dataclass(frozen=True, slots=True)
class Finding:
    """One check's judgement: what was expected, what was found, what to do about it."""

    id: str
    verdict: Verdict
    severity: Severity
    expected: str
    found: str
    hint: str = ""
    status: int = 20
    irreversible: bool = False
    allowed: bool = False

    @property
    def blocks(self) -> bool:
        """A failed block stops the operation; unknown does only where it cannot be undone."""
        if self.allowed or self.severity != "block":
            return False
        return self.verdict == "fail" or (self.verdict == "unknown" and self.irreversible)

    def to_json(self) -> dict[str, Any]:
        """The six keys of the contract, and `allowed` where an override was used."""
        out: dict[str, Any] = {
            "id": self.id,
            "verdict": self.verdict,
            "severity": self.severity,
            "expected": self.expected,
            "found": self.found,
            "hint": self.hint,
        }
        if self.allowed:
            out["allowed"] = True
        return out


@dataclass(frozen=True, slots=True)
class Report:
    """The result of one verb."""

    command: str
    outcome: Outcome
    process: ProcessState
    data: dict[str, Any] = field(default_factory=dict)
    findings: tuple[Finding, ...] = ()
    error: GpuckptError | None = None

    @property
    def exit_status(self) -> int:
        """The error's, else the restored job's own (--wait), else 0."""
        if self.error is not None:
            return exit_status(self.error)
        status = self.data.get("exit_status")
        return status if isinstance(status, int) else 0

    def to_json(self) -> dict[str, Any]:
        """The envelope: all keys always present."""
        error = None
        if self.error is not None:
            error = {"code": self.error.code, "message": self.error.message, "hint": self.error.hint}
        return {
            "gpuckpt": 1,
            "command": self.command,
            "outcome": self.outcome,
            "process": self.process,
            "data": self.data,
            "findings": [finding.to_json() for finding in self.findings],
            "error": error,
        }


@dataclass(frozen=True, slots=True)
class Event:
    """Progress of a running operation: a phase began, advanced or ended, or a command of the user said something."""

    phase: str
    state: Literal["begin", "progress", "end", "note", "output"]
    message: str = ""
    done_bytes: int | None = None
    total_bytes: int | None = None
    seconds: float | None = None
    job_is_on: str | None = None
    """In a migration: the host that owns the job from now on, as it names itself; 'unknown' where nobody can tell."""

    def to_json(self) -> dict[str, Any]:
        """One JSON line on stderr; unset fields are left out."""
        out: dict[str, Any] = {"event": self.phase, "state": self.state}
        for name in ("message", "done_bytes", "total_bytes", "seconds", "job_is_on"):
            value = getattr(self, name)
            if value not in (None, ""):
                out[name] = value
        return out

"""What a check is, and the words that checks share."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

from gpuckpt.model.records import dataclass
from gpuckpt.model.report import Finding, Severity, Verdict

Facts_contra = TypeVar("Facts_contra", contravariant=True)


@dataclass(frozen=True, slots=True)
class Judgement:
    """What a check says about the facts; Check.finding adds what the check itself is."""

    verdict: Verdict
    expected: str
    found: str
    hint: str = ""
    severity: Severity | None = None
    """Where a case is milder or graver than the check usually is."""


@dataclass(frozen=True, slots=True)
class Check(Generic[Facts_contra]):
    """One check: a pure function of facts, with what a failure means."""

    id: str
    severity: Severity
    summary: str
    """One line for the manual."""
    judge: Callable[[Facts_contra], Judgement | None]
    """None: the check does not apply to these facts."""
    irreversible: bool = False
    """The damage cannot be undone, so unknown blocks as well."""
    status: int = 20
    allowable: bool = True
    """False where going on cannot work at all, or would harm something else: --allow does not open it."""

    def finding(self, facts: Facts_contra, allow: frozenset[str]) -> Finding | None:
        """The judgement as a finding; None where the check does not apply."""
        judgement = self.judge(facts)
        if judgement is None:
            return None
        severity = judgement.severity or self.severity
        overridden = self.allowable and self.id in allow and severity == "block" and judgement.verdict != "pass"
        return Finding(
            id=self.id,
            verdict=judgement.verdict,
            severity=severity,
            expected=judgement.expected,
            found=judgement.found,
            hint="" if judgement.verdict == "pass" else judgement.hint,
            status=self.status,
            irreversible=self.irreversible,
            allowed=overridden,
        )


def passed(expected: str, found: str) -> Judgement:
    """All is as it must be."""
    return Judgement("pass", expected, found)


def failed(expected: str, found: str, hint: str, severity: Severity | None = None) -> Judgement:
    """Something is not as it must be; `hint` says what to do."""
    return Judgement("fail", expected, found, hint, severity)


def unknown(expected: str, found: str, hint: str, severity: Severity | None = None) -> Judgement:
    """It could not be found out; `found` says what is not known."""
    return Judgement("unknown", expected, found, hint, severity)


def none_of(
    bad: Iterable[str], *, expected: str, hint: str, fine: str = "none", severity: Severity | None = None
) -> Judgement:
    """Pass when nothing is in `bad`, else fail and name all of it."""
    items = tuple(bad)
    return failed(expected, listing(items), hint, severity) if items else passed(expected, fine)


def listing(items: Iterable[str]) -> str:
    """All items in one line: a list that hides the last one costs another attempt."""
    return "; ".join(items)


def size(count: float) -> str:
    """'812 MiB', '17.3 GiB'."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if value >= 100 or unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def version(text: str | None) -> tuple[int, ...]:
    """(6, 18, 5) of '6.18.5-generic'; empty for None or a text without a number in front."""
    match = re.match(r"\d+(?:\.\d+)*", text or "")
    return tuple(int(part) for part in match.group().split(".")) if match else ()

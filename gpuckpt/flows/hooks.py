"""The user's own commands around a dump or restore (--pre-dump, --post-dump, --pre-restore, --post-restore).

In a migration those of the dump run on the host that gives the job away, around all of it, and those of the restore
on the other one, around the copy.

The first runs when the checks have passed and before anything is touched; what it can change is judged again after
it. The last runs whenever the operation got so far, whatever came of it: what the first one did can be undone there.
kill -9 of gpuckpt: the tree is as safe as without hooks; the command goes on by itself; that the last one did not run
is said by the next gpuckpt that works on any tree.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from gpuckpt import checks
from gpuckpt.flows.interruption import BrokenOff
from gpuckpt.model.errors import GpuckptError, Refused, RestoredUnhealthy
from gpuckpt.model.report import Event, Finding, Report
from gpuckpt.system.shell import Ended, run_line

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from gpuckpt.flows.interruption import Interruption
    from gpuckpt.flows.machine import Machine
    from gpuckpt.model.requests import Hooks
    from gpuckpt.owner.runs import Run


FIRST = {"dump": "--pre-dump", "migrate": "--pre-dump", "restore": "--pre-restore"}
LAST = {"dump": "--post-dump", "migrate": "--post-dump", "restore": "--post-restore"}
_NOUNS = {"migrate": "migration"}


def planned(verb: str, hooks: Hooks) -> dict[str, dict[str, str]]:
    """For the plan: which commands would be run."""
    lines = {FIRST[verb]: hooks.before, LAST[verb]: hooks.after}
    given = {name.removeprefix("--"): line for name, line in lines.items() if line is not None}
    return {"hooks": given} if given else {}


def before_it(findings: Iterable[Finding], verb: str, hooks: Hooks) -> tuple[Finding, ...]:
    """The findings from before the first command: what that may change does not refuse yet."""
    if hooks.before is None:
        return tuple(findings)
    return tuple(_soften(finding, verb) for finding in findings)


def _soften(finding: Finding, verb: str) -> Finding:
    if not finding.blocks or finding.id not in checks.HOOK_MAY_LIFT:
        return finding
    return replace(finding, severity="warn", hint=f"judged again after {FIRST[verb]}; {finding.hint}")


@dataclass
class Hooked:
    """One operation between its two commands."""

    verb: str
    hooks: Hooks
    pid: int
    image: str
    """As it is called in words."""
    run: Run
    machine: Machine
    interruption: Interruption
    broken_off: Callable[[BrokenOff], GpuckptError]
    """What a signal or the deadline in the first command is to the user: nothing was touched."""
    image_id: str = ""
    """Of the image that is restored; a dump's is known when it is done."""
    clone_id: str = ""
    """Tells clones of one image apart."""
    seconds: dict[str, float] = field(default_factory=dict)
    last_has_run: bool = False

    def carry_out(self, look_again: Callable[[], None], act: Callable[[], Report]) -> Report:
        """Run the commands around `act`. After the first one `look_again` judges anew, and may raise.

        Raises Refused when the first command fails, and what `act` raises; that the last one failed as well is
        added to its hint.
        """
        if self.hooks.after is not None:
            # Without the command itself: it may hold a token, and these words come to stand in notes.
            words = f"gpuckpt {self.verb} of {self.pid} was killed before its {LAST[self.verb]} ran"
            self.run.owe(f"{words}: see yourself to what that does")
        try:
            if self.hooks.before is not None:
                self._run_first(self.hooks.before)
                look_again()
            report = act()
        except BaseException as error:
            self._after_failure(error)
            raise
        return self._after(report)

    def _run_first(self, line: str) -> None:
        try:
            ended = self._run(FIRST[self.verb], line, {}, self.interruption.check)
        except BrokenOff as trouble:
            raise self.broken_off(trouble) from None
        if not ended.ok:
            finding = self._finding(FIRST[self.verb], ended.describe(), "block")
            error = Refused(f"--{finding.id} {finding.found}", finding.hint)
            error.findings = (finding,)
            raise error

    def _after_failure(self, error: BaseException) -> None:
        """The outcome stays what it is; what else went wrong is told beside it."""
        known = error if isinstance(error, GpuckptError) else None
        outcome = "refused" if isinstance(error, Refused) else "failed"
        with self._signal_aside():
            finding = self.run_last(outcome, known.process if known else "", self.interruption.check_signals)
        if finding is not None and known is not None:
            known.hint = "; ".join(part for part in (known.hint, f"--{finding.id} {finding.found}") if part)

    def _after(self, report: Report) -> Report:
        self.image_id = str(report.data.get("image_id") or self.image_id)
        # A tree that has moved is told of as a dump's that has ended: here there is nothing to be woken.
        process = "ended" if self.verb == "migrate" and report.process == "restored" else report.process
        with self._signal_aside():
            finding = self.run_last(report.outcome, process, self.interruption.check_signals)
        if self.seconds:
            report = replace(report, data={**report.data, "seconds": {**report.data["seconds"], **self.seconds}})
        if finding is None:
            return report
        report = replace(report, findings=(*report.findings, finding))
        # A service that was not registered again does not serve, well as it may run.
        unhealthy = RestoredUnhealthy(f"--{finding.id} {finding.found}", finding.hint, process="restored")
        return replace(report, outcome="failed", error=unhealthy) if process == "restored" else report

    @contextlib.contextmanager
    def _signal_aside(self) -> Iterator[None]:
        """The signal that ended the operation does not end the last command as well; another one does."""
        caught, self.interruption.caught = self.interruption.caught, None
        try:
            yield
        finally:
            self.interruption.caught = caught or self.interruption.caught

    def run_last(self, outcome: str, process: str, check: Callable[[], None]) -> Finding | None:
        """Run the last command, once; what is to be said where it did not end well."""
        if self.hooks.after is None or self.last_has_run:
            return None
        self.last_has_run = True
        name = LAST[self.verb]
        try:
            ended = self._run(name, self.hooks.after, {"GPUCKPT_OUTCOME": outcome, "GPUCKPT_PROCESS": process}, check)
            problem = None if ended.ok else ended.describe()
        except BrokenOff as trouble:
            problem = f"was ended: {trouble.why}"
        finally:
            self.run.owe(None)
        return None if problem is None else self._finding(name, problem, "warn")

    def variables(self, phase: str) -> dict[str, str]:
        """What every command of the user is told."""
        return {
            "GPUCKPT_PHASE": phase,
            "GPUCKPT_PID": str(self.pid),
            "GPUCKPT_IMAGE": self.image,
            "GPUCKPT_HOST": os.uname().nodename,
            **({"GPUCKPT_IMAGE_ID": self.image_id} if self.image_id else {}),
            **({"GPUCKPT_CLONE_ID": self.clone_id} if self.clone_id else {}),
        }

    def _run(self, name: str, line: str, more: Mapping[str, str], check: Callable[[], None]) -> Ended:
        name = name.removeprefix("--")
        phase = name.replace("-", "_")
        self.machine.listener(Event(phase, "begin"))
        variables = {**self.variables(name), **more}

        def hear(said: str) -> None:
            self.machine.listener(Event(phase, "output", said))

        try:
            ended = run_line(line, variables, timeout=self.hooks.timeout_seconds, hear=hear, check=check)
        except OSError as error:
            return Ended(127, (f"it could not be started: {error.strerror}",))
        self.seconds[phase] = ended.seconds
        self.machine.listener(Event(phase, "end", seconds=ended.seconds))
        return ended

    def _finding(self, name: str, found: str, severity: Any) -> Finding:
        state = (
            "nothing was touched" if severity == "block" else f"what the {_NOUNS.get(self.verb, self.verb)} did stands"
        )
        return Finding(
            id=name.removeprefix("--"),
            verdict="fail",
            severity=severity,
            expected=f"the command ends with 0 within {self.hooks.timeout_seconds:g} s",
            found=found,
            hint=f"{state}; try the command by itself",
        )

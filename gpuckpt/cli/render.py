"""The report of a run as text for a person or as one JSON object for a program."""

from __future__ import annotations

import json
import sys
from typing import Any

from gpuckpt.cli import words
from gpuckpt.cli.canvas import write
from gpuckpt.cli.manner import Manner, is_terminal
from gpuckpt.model.errors import GpuckptError, Interrupted
from gpuckpt.model.report import HOOK_PHASES, Finding, Report

STATES = {
    "running": "the process runs on as before",
    "ended": "the process has ended",
    "restored": "the process was restored",
    "frozen": "the process is held and does not run",
    "gone": "the process is gone",
    "untouched": "nothing was touched",
}


def present(report: Report, manner: Manner, *, looked: bool = True) -> int:
    """Show a report and give the exit status. `looked`: somebody saw what the process does."""
    if manner.json:
        envelope = report.to_json()
        if not looked:
            envelope["process"] = None
        write(sys.stdout, json.dumps(envelope) + "\n")
    else:
        _show(report, manner)
    return final_status(report)


def final_status(report: Report) -> int:
    """The exit status."""
    return report.exit_status


def _show(report: Report, manner: Manner) -> None:
    if report.command == "inspect" and report.data:
        _draw_inspection(report, manner)
    elif _is_plan(report, manner):
        _draw_plan(report)
    if report.error is not None:
        lines = failure_lines(report, report.error, manner)
        if manner.one_line and not is_terminal(sys.stderr):
            lines = [joined(lines)]
        write(sys.stderr, "".join(f"{line}\n" for line in lines))
    else:
        write(sys.stderr, "".join(f"{line}\n" for line in warning_lines(report, manner)))
        if not manner.silent:
            write(sys.stdout, "".join(f"{line}\n" for line in result_lines(report)))


def _is_plan(report: Report, manner: Manner) -> bool:
    return report.outcome == "planned" or (manner.dry_run and bool(report.findings))


def _draw_inspection(report: Report, manner: Manner) -> None:
    from gpuckpt.cli.inspection import draw_inspection  # noqa: PLC0415  draws with rich

    draw_inspection(report, manner)


def _draw_plan(report: Report) -> None:
    from gpuckpt.cli.findings import draw_plan  # noqa: PLC0415  draws with rich

    draw_plan(report)


def failure_lines(report: Report, error: GpuckptError, manner: Manner) -> list[str]:
    """What happened, why, what to do: three lines; where several checks refuse, three for each."""
    lines = [f"gpuckpt: {_headline(report, error)}"]
    if _is_plan(report, manner):
        return lines  # the plan has just said why
    blocking = [finding for finding in report.findings if finding.blocks]
    if len(blocking) > 1 and error.status in (10, 20, 21, 22):
        return lines + [line for finding in blocking for line in _finding_lines(finding)]
    lines.append(f"  why: {words.safe(error.message)}")
    if error.hint:
        lines.append(f"  do:  {words.safe(error.hint)}")
    return lines


def joined(lines: list[str]) -> str:
    """The lines of a failure as one."""
    headline, *rest = (" ".join(line.split()) for line in lines)
    return "; ".join([headline, *(line.removeprefix("why: ") for line in rest)])


def _headline(report: Report, error: GpuckptError) -> str:
    if isinstance(error, Interrupted):
        return f"{report.command or 'gpuckpt'} interrupted; {STATES[error.process]}"
    what = error.meaning.split(":")[0]
    if error.status == 20:
        what = f"{report.command} refused; nothing was touched"
    if error.process == type(error).process:
        return what
    # What is usually left ("nothing is left behind") is not what was left this time.
    return f"{what.split(';')[0]}; {STATES[error.process]}"


def _finding_lines(finding: Finding) -> list[str]:
    lines = [f"  {finding.id}: {words.safe(finding.found)}", f"    expected: {words.safe(finding.expected)}"]
    return [*lines, f"    do: {words.safe(finding.hint)}"] if finding.hint else lines


def warning_lines(report: Report, manner: Manner) -> list[str]:
    """One line for each check that did not pass and does not block, and for each note of the run.

    A failed warning is said without a terminal too: cron sends it, whoever reads it must act. The rest repeats itself.
    """
    if manner.quiet or report.outcome == "planned" or report.command == "inspect":
        return []
    if manner.silent:
        return [_warning(finding) for finding in report.findings if warns(finding) and finding.severity == "warn"]
    notes = [f"gpuckpt: note: {words.safe(note)}" for note in report.data.get("notes") or ()]
    return [_warning(finding) for finding in report.findings if warns(finding)] + notes


def warns(finding: Finding) -> bool:
    """A failed warn, an unknown block, or a block that was allowed."""
    if finding.verdict == "pass" or finding.severity == "note" or finding.blocks:
        return False
    return finding.severity == "block" or finding.verdict == "fail"


def _warning(finding: Finding) -> str:
    text = f"gpuckpt: warning: {finding.id}: {words.safe(finding.found)} (expected: {words.safe(finding.expected)})"
    if finding.allowed:
        return f"{text}; allowed by --allow"
    return f"{text}; {words.safe(finding.hint)}" if finding.hint else text


def result_lines(report: Report) -> list[str]:
    """The one line that says a dump, restore or repair is done."""
    if report.command == "inspect":
        return [words.safe(command) for command in (report.data.get("extracted") or {}).get("commands", ())]
    if report.outcome == "planned" or "exit_status" in report.data:
        return []
    said = {"dump": _dumped, "push": _transferred, "pull": _transferred, "migrate": _migrated}.get(
        report.command, _restored
    )
    return [said(report)]


def _transferred(report: Report) -> str:
    data, seconds = report.data, report.data.get("seconds") or {}
    sent, skipped = data.get("bytes_sent") or 0, data.get("bytes_skipped") or 0
    image, location = words.safe(data.get("image", "?")), words.safe(data.get("location", "?"))
    if not seconds.get("transfer") and not skipped:
        return f"{location}: every byte is there; verified by {words.safe(data.get('verified', '?'))}"
    rate = words.rate(sent, seconds.get("transfer"))
    parts = [
        f"{report.command}ed {image} to {location}",
        f"{words.size(sent)} sent{f' at {rate}' if rate else ''}",
        f"{words.size(skipped)} were there" if skipped else "",
        f"verified by {words.safe(data.get('verified', '?'))}",
        f"{words.safe(data['deleted'])} removed" if data.get("deleted") else "",
    ]
    return ", ".join(part for part in parts if part)


def _migrated(report: Report) -> str:
    data = report.data
    parts = [f"moved {_tree(data)} to {words.safe(data.get('to', '?'))}"]
    if data.get("bytes_sent"):
        rate = words.rate(data["bytes_sent"], (data.get("seconds") or {}).get("transfer"))
        parts.append(f"{words.size(data['bytes_sent'])} sent{f' at {rate}' if rate else ''}")
    stood = data.get("downtime_seconds")
    return f"{', '.join(parts)}; it runs there" + (f", and stood still for {words.duration(stood)}" if stood else "")


def _dumped(report: Report) -> str:
    data = report.data
    parts = [f"dumped {_tree(data)} to {words.safe(data.get('image', '?'))}"]
    if data.get("bytes_stored") is not None:
        parts.append(f"{words.size(data['bytes_stored'])}")
    if data.get("frozen_seconds") is not None:
        parts.append(f"frozen {words.duration(data['frozen_seconds'])}")
    gone = (data.get("series") or {}).get("removed")
    if gone:
        parts.append(f"{words.count(len(gone), 'older image')} removed")
    pushed = (data.get("series") or {}).get("pushed")
    if pushed:
        parts.append(f"pushed to {words.safe(pushed.get('location', '?'))}")
    return f"{', '.join(parts)}; {STATES[report.process]}"


def _restored(report: Report) -> str:
    data = report.data
    if data.get("duty") == "nothing" and report.process == "running":
        return f"nothing to repair: {_tree(data)} runs"
    if not data.get("image"):
        return f"repaired {_tree(data)}; {STATES[report.process]}"
    others = ("ready", *HOOK_PHASES)
    seconds = {phase: took for phase, took in (data.get("seconds") or {}).items() if phase not in others}
    took = f" in {words.duration(sum(seconds.values()))}" if seconds else ""
    return "; ".join([f"restored {_tree(data)} from {words.safe(data['image'])}{took}", *_readiness(data)])


def _readiness(data: dict[str, Any]) -> list[str]:
    """'ready after 6.1 s', 'a cold start took 94 s: 15 x'; from the beginning of the command."""
    if "ready_seconds" not in data:
        return []
    ready = [f"ready after {words.duration(data['ready_seconds'])}"]
    cold = data.get("cold_start")
    if cold is None:
        return ready
    factor = cold["factor"]
    shown = f"{factor:.0f}" if factor >= 9.95 else f"{factor:.1f}"
    return [*ready, f"a cold start took {words.duration(cold['seconds'])}: {shown} x"]


def _tree(data: dict[str, object]) -> str:
    pids, inside = data.get("pids"), data.get("namespace_pids")
    several = f" ({words.count(len(pids), 'process', 'processes')})" if isinstance(pids, (list, tuple)) else ""
    own = f", {inside[0]} in its own pid namespace," if pids and isinstance(inside, (list, tuple)) and inside else ""
    return f"{data.get('root_pid', 'the tree')}{several}{own}"

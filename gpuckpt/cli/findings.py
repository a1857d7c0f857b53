"""The checks as a table: what refuses first, what passes last."""

from __future__ import annotations

from collections.abc import Iterable

from rich.text import Text

from gpuckpt.cli import words
from gpuckpt.cli.sheet import BAD, FAINT, GOOD, UNSURE, Sheet
from gpuckpt.model.report import Finding, Report

NEEDED = {"unchanged": "as it is", "may-grow": "may have grown", "in-image": "in the image"}
UNCHANGED = (
    "as it is: when the dump is made, unless --capture-files writable saves it into the image; "
    "one that only grew is cut by `gpuckpt restore --truncate-files`"
)


def draw_plan(report: Report) -> None:
    """The screen of --dry-run: what would be done, and every check."""
    sheet = Sheet(all_lines=True)
    sheet.title(f"Plan: {report.command}", _subject(report), _forecast(report))
    if report.data.get("hooks"):
        sheet.heading("Commands", "not run now")
        sheet.facts(report.data["hooks"].items())
    _add_files(sheet, [one for one in report.data.get("files") or () if "needed" in one])
    add_findings(sheet, report.findings, passes=True)
    for note in report.data.get("notes") or ():
        sheet.line(Text(f"note: {words.safe(note)}", FAINT))
    sheet.draw()


def _add_files(sheet: Sheet, files: list[dict[str, str]]) -> None:
    """What a restore will need of the files that the tree of a dump can change."""
    if not files:
        return
    sheet.heading("Files", "those that the tree writes to, as a restore will need them")
    sheet.table("NEEDED FILE", [(NEEDED[one["needed"]], one["path"]) for one in files])
    if any(one["needed"] == "unchanged" for one in files):
        sheet.line(Text(UNCHANGED, FAINT))


def _subject(report: Report) -> str:
    root, image = report.data.get("root_pid", ""), report.data.get("image", "")
    joint = {"dump": " to ", "restore": " from ", "migrate": " to "}.get(report.command, " ")
    return joint.join(filter(None, (str(root), str(image or report.data.get("to", "")))))


def _forecast(report: Report) -> Text:
    refusing = sum(finding.blocks for finding in report.findings)
    if refusing or report.error is not None:
        return Text(f"would be refused: {words.count(max(refusing, 1), 'check')} in the way", BAD)
    estimate = report.data.get("estimate")
    return Text(f"would go ahead{_roughly(estimate) if estimate else ''}; nothing was touched", GOOD)


def _roughly(estimate: dict[str, float]) -> str:
    """What a migration would take."""
    size, rate = words.size(estimate["image_bytes"]), words.size(estimate["bytes_per_second"])
    stands, sent = words.duration(estimate["downtime_seconds"]), words.duration(estimate["transfer_seconds"])
    return (
        f": up to {size} at {rate}/s on one connection, so at most about {stands} of standing still, {sent} of transfer"
    )


def add_findings(sheet: Sheet, findings: Iterable[Finding], *, passes: bool) -> None:
    """A heading and the table of checks. Those that pass are only counted unless `passes`."""
    ordered = sorted(findings, key=_rank)
    if not ordered:
        return
    passed = [finding for finding in ordered if finding.verdict == "pass"]
    rows = [row for finding in ordered if passes or finding.verdict != "pass" for row in [_row(finding)]]
    sheet.heading("Checks", _summary(ordered, len(passed)))
    sheet.table("VERDICT CHECK FOUND", rows)


def _summary(findings: list[Finding], passed: int) -> str:
    refusing = sum(finding.blocks for finding in findings)
    parts = [f"{passed} of {len(findings)} pass"]
    return ", ".join([*parts, f"{refusing} refuse" if refusing != 1 else "1 refuses"] if refusing else parts)


def _rank(finding: Finding) -> tuple[int, str]:
    if finding.verdict == "pass":
        return 4, finding.id
    if finding.blocks:
        return 0, finding.id
    return {"block": 1, "warn": 2, "note": 3}[finding.severity], finding.id


def _row(finding: Finding) -> tuple[Text, str, Text]:
    text = Text(words.safe(finding.found or "-"))
    if finding.verdict != "pass":
        text.append(f"\nexpected: {words.safe(finding.expected)}", FAINT)
        if finding.hint:
            text.append(f"\n{words.safe(finding.hint)}")
    return _verdict(finding), finding.id, text


def _verdict(finding: Finding) -> Text:
    if finding.verdict == "pass":
        return Text("ok", GOOD)
    if finding.allowed:
        return Text("allowed", UNSURE)
    if finding.blocks:
        return Text("REFUSES", BAD)
    if finding.verdict == "unknown":
        return Text("unknown", UNSURE)
    return Text("warns", UNSURE) if finding.severity != "note" else Text("note", FAINT)

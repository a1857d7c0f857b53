"""`inspect` for a person: one screen for an image, a process tree or this host."""

from __future__ import annotations

import time
from typing import Any

from rich.text import Text

from gpuckpt.cli import words
from gpuckpt.cli.findings import add_findings
from gpuckpt.cli.hostsheet import add_host, host_verdict
from gpuckpt.cli.imagesheet import add_captured, add_parts, add_timings, image_facts, image_verdict
from gpuckpt.cli.manner import Manner
from gpuckpt.cli.seriessheet import add_series, series_verdict
from gpuckpt.cli.sheet import BAD, GOOD, UNSURE, Cell, Sheet
from gpuckpt.cli.treesheet import add_tree, tree_facts
from gpuckpt.model.facts import Host, Tree
from gpuckpt.model.jsonform import from_json
from gpuckpt.model.report import Report


def draw_inspection(report: Report, manner: Manner) -> None:
    """Draw the screen for what was inspected."""
    sheet = Sheet(all_lines=manner.verbose)
    draw = {
        "image": _image,
        "series": _series,
        "process": _process,
        "host": _host,
        "configuration": _configuration,
    }.get(report.data.get("kind", ""))
    if draw is not None:
        draw(sheet, report, report.data)
        add_findings(sheet, report.findings, passes=manner.verbose)
        sheet.draw()


def _image(sheet: Sheet, report: Report, data: dict[str, Any]) -> None:
    from gpuckpt.model.manifest import Manifest  # noqa: PLC0415  needs blake3; a process or host does not

    manifest = from_json(Manifest, data["manifest"])
    sheet.title("Image", str(data.get("path", "")), image_verdict(data, report.findings))
    sheet.facts(image_facts(manifest, data, now=time.time()))
    add_tree(sheet, manifest.tree, manifest.host)
    add_captured(sheet, manifest)
    add_parts(sheet, manifest)
    add_timings(sheet, manifest)


def _series(sheet: Sheet, _report: Report, data: dict[str, Any]) -> None:
    sheet.title("Series", str(data["path"]), series_verdict(data))
    add_series(sheet, data)


def _process(sheet: Sheet, report: Report, data: dict[str, Any]) -> None:
    tree, host = from_json(Tree, data["tree"]), from_json(Host, data["host"])
    root = tree.processes[0] if tree.processes else None
    sheet.title("Process", f"{tree.root.pid} {root.comm if root else ''}", _dumpable(data, report))
    estimate = data.get("estimate_bytes")
    size = f"about {words.size(estimate)}" if estimate is not None else ""
    sheet.facts([*tree_facts(tree), ("image size", size), ("held", _held(data, tree))])
    add_tree(sheet, tree, host)


def _held(data: dict[str, Any], tree: Tree) -> Cell:
    interrupted = data.get("interrupted")
    if not interrupted:
        return ""
    what, since = words.safe(interrupted.get("operation", "run")), interrupted.get("since")
    when = f", since {words.moment(since)}" if isinstance(since, (int, float)) and since else ""
    repair = f"gpuckpt restore --tree {tree.root.pid}"
    given = interrupted.get("given_to")
    if given:
        ending = f"kill -KILL {' '.join(str(pid) for pid in tree.pids)}"
        return Text(f"given to {words.safe(given)}{when}; if it runs there: {ending}; if it does not: {repair}", BAD)
    return Text(f"by an interrupted {what}{when}: {repair}", BAD)


def _dumpable(data: dict[str, Any], report: Report) -> Text:
    refusing = sum(finding.blocks for finding in report.findings)
    if data.get("dumpable") == "yes":
        return Text("can be dumped now", GOOD)
    if data.get("dumpable") == "no":
        checks = f": {words.count(refusing, 'check')} in the way" if refusing else ""
        return Text(f"cannot be dumped as it is{checks}", BAD)
    return Text("not known whether it can be dumped", UNSURE)


def _configuration(sheet: Sheet, _report: Report, data: dict[str, Any]) -> None:
    from gpuckpt.cli.configsheet import add_configuration  # noqa: PLC0415  no other screen needs it

    add_configuration(sheet, data)


def _host(sheet: Sheet, _report: Report, data: dict[str, Any]) -> None:
    host, can = from_json(Host, data["host"]), data.get("can") or {}
    sheet.title("Host", host.hostname, host_verdict(can))
    add_host(sheet, host, can)

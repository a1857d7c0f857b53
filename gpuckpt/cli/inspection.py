"""`inspect` for a person: one calm screen, or the lists that were asked for."""

from __future__ import annotations

from typing import Any

from rich.text import Text

from gpuckpt.cli import words
from gpuckpt.cli.findings import add_findings
from gpuckpt.cli.hostsheet import add_gpus as add_host_gpus
from gpuckpt.cli.hostsheet import add_host, add_host_facts, host_verdict
from gpuckpt.cli.manner import Manner
from gpuckpt.cli.sections import Drawings, add_sections, has_first_screen
from gpuckpt.cli.seriessheet import add_series, series_verdict
from gpuckpt.cli.sheet import BAD, GOOD, UNSURE, Cell, Sheet
from gpuckpt.cli.treelists import add_files, add_gpus, add_job_environment, add_sockets
from gpuckpt.cli.treesheet import add_processes, tree_facts
from gpuckpt.model.facts import Host, Tree
from gpuckpt.model.jsonform import from_json
from gpuckpt.model.report import Report


def draw_inspection(report: Report, manner: Manner) -> None:
    """Draw the screen for what was inspected."""
    sheet = Sheet(all_lines=manner.verbose or manner.everything or bool(manner.sections))
    draw = {
        "image": _image,
        "series": _series,
        "process": _process,
        "host": _host,
        "configuration": _configuration,
    }.get(report.data.get("kind", ""))
    if draw is not None:
        draw(sheet, report, manner)
        sheet.draw()


def _image(sheet: Sheet, report: Report, manner: Manner) -> None:
    from gpuckpt.cli.imagescreen import draw_image  # noqa: PLC0415  needs blake3; a process or host does not

    draw_image(sheet, report, manner)


def _series(sheet: Sheet, report: Report, manner: Manner) -> None:
    sheet.title("Series", str(report.data["path"]), series_verdict(report.data))
    add_series(sheet, report.data)
    add_findings(sheet, report.findings, passes=manner.verbose or manner.everything)


def _process(sheet: Sheet, report: Report, manner: Manner) -> None:
    data = report.data
    tree, host = from_json(Tree, data["tree"]), from_json(Host, data["host"])
    root = tree.processes[0] if tree.processes else None
    drawings: Drawings = {
        "files": lambda: add_files(sheet, tree),
        "sockets": lambda: add_sockets(sheet, tree),
        "gpus": lambda: add_gpus(sheet, tree, host),
        "environment": lambda: add_job_environment(sheet, tree),
    }
    sheet.title("Process", f"{tree.root.pid} {root.comm if root else ''}", _dumpable(data, report))
    if has_first_screen(manner):
        estimate = data.get("estimate_bytes")
        size = f"about {words.size(estimate)}" if estimate is not None else ""
        sheet.facts([("image size", size), ("held", _held(data, tree)), *tree_facts(tree, host)])
        add_processes(sheet, tree)
    add_sections(sheet, report, manner, drawings)


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


def _configuration(sheet: Sheet, report: Report, _manner: Manner) -> None:
    from gpuckpt.cli.configsheet import add_configuration  # noqa: PLC0415  no other screen needs it

    add_configuration(sheet, report.data)


def _host(sheet: Sheet, report: Report, manner: Manner) -> None:
    host, can = from_json(Host, report.data["host"]), report.data.get("can") or {}
    sheet.title("Host", host.hostname, host_verdict(can))
    if has_first_screen(manner):
        add_host(sheet, host, can)
        add_findings(sheet, report.findings, passes=manner.verbose or manner.everything)
        return
    drawings: Drawings = {
        "gpus": lambda: add_host_gpus(sheet, host),
        "environment": lambda: add_host_facts(sheet, host),
    }
    for name in manner.sections:
        drawings[name]()

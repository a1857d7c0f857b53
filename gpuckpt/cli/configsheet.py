"""`inspect --show-config`: the value of each option in force, and where it comes from."""

from __future__ import annotations

from typing import Any

from rich.text import Text

from gpuckpt.cli import words
from gpuckpt.cli.config import OF_ONE_RUN, Setting, Table
from gpuckpt.cli.sheet import FAINT, GOOD, Sheet
from gpuckpt.cli.verb import all_options, configuration_of
from gpuckpt.model.report import Report

DEFAULT = "default"


def config_report(context: Any) -> Report:
    """The configuration as a report: the files, and a value for each option that a file may set."""
    found = configuration_of(context)
    values = [
        _value({"command": command, "option": name}, found.commands.get(command, {}).get(name), item.default)
        for command, items in all_options().items()
        for name, item in items.items()
        if name not in OF_ONE_RUN
    ]
    data = {
        "kind": "configuration",
        "files": [{"path": str(file.path), "found": file.content is not None} for file in found.files],
        "values": values + [value for host, table in found.hosts.items() for value in _of_host(host, table)],
    }
    return Report("inspect", "ok", "untouched", data)


def _of_host(host: str, table: Table) -> list[dict[str, Any]]:
    return [_value({"host": host, "option": name}, setting, None) for name, setting in table.items()]


def _value(what: dict[str, str], setting: Setting | None, default: Any) -> dict[str, Any]:
    if setting is None:
        return {**what, "value": default, "from": DEFAULT}
    return {**what, "value": setting.value, "from": str(setting.path)}


def add_configuration(sheet: Sheet, data: dict[str, Any]) -> None:
    """A table for each command and each host."""
    sheet.all_lines = True  # asked for are all of them
    given = sum(value["from"] != DEFAULT for value in data["values"])
    verdict = Text(f"{words.count(given, 'option')} set by files", GOOD if given else FAINT)
    sheet.title("Configuration", ", ".join(_file(file) for file in data["files"]), verdict)
    for title, rows in _grouped(data["values"]).items():
        sheet.heading(title)
        sheet.table("OPTION VALUE", rows)


def _file(file: dict[str, Any]) -> str:
    return str(file["path"]) if file["found"] else f"{file['path']} (not there)"


def _grouped(values: list[dict[str, Any]]) -> dict[str, list[tuple[str, Text]]]:
    found: dict[str, list[tuple[str, Text]]] = {}
    for value in values:
        title = f'[host."{value["host"]}"]' if "host" in value else f"[{value['command']}]"
        found.setdefault(title, []).append((value["option"], _with_origin(value)))
    return found


def _with_origin(value: dict[str, Any]) -> Text:
    # In one cell: both can be long, and only the last column is folded.
    if value["from"] == DEFAULT:
        return Text(f"{_shown(value['value'])}  {DEFAULT}", FAINT)
    return Text.assemble((words.safe(_shown(value["value"])), GOOD), (f"  from {words.safe(value['from'])}", FAINT))


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "true" if value else "false"
    return ", ".join(value) if isinstance(value, list) else str(value)

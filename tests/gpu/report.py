#!/usr/bin/env python3
"""The matrix's results as Markdown for RESULTS.md, and a picture of the seconds by phase.

    python tests/gpu/report.py FILE-OR-FOLDER... [--svg PICTURE]

Reads the rows-*.json of any number of runs; of several results of one row the newest counts. A row of the table without a
result is `not run`, never passed.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from tests.bench import picture  # noqa: E402 - the script runs from anywhere
from tests.gpu.rows import ALL_ROWS, RATES  # noqa: E402

Entry = dict[str, Any]

PHASES = {
    "dump": ("lock", "gpu_to_host", "freeze", "capture", "files", "publish"),
    "restore": ("criu", "inject", "host_to_gpu", "ready"),
}
COLOURS = {
    "lock": "#6c757d", "gpu_to_host": "#2a6f97", "freeze": "#adb5bd", "capture": "#61a5c2", "files": "#ced4da",
    "publish": "#a9d6e5", "criu": "#bc6c25", "inject": "#dda15e", "host_to_gpu": "#606c38", "ready": "#c1121f",
}  # fmt: skip
MOST_WORDS = 160


def read(places: list[Path]) -> list[Entry]:
    """All entries, oldest first."""
    files = [file for place in places for file in (sorted(place.rglob("rows*.json")) if place.is_dir() else [place])]
    entries = [in_one_form(entry) for file in files for entry in json.loads(file.read_text())]
    return sorted(entries, key=lambda entry: entry["time"])


FIGURES = ("gpu_memory_bytes", "raw_bytes", "stored_bytes", "frozen_seconds", "running_seconds", "cold_start_seconds")


def in_one_form(entry: Entry) -> Entry:
    """Other tests than the matrix's record figures of several images or processes too: no column holds those.

    GPU memory by process is added up.
    """
    memory = entry.get("gpu_memory_bytes")
    one = {**entry, "gpu_memory_bytes": sum(memory.values())} if isinstance(memory, dict) else dict(entry)
    for name in FIGURES:
        if not isinstance(one.get(name), int | float):
            one.pop(name, None)
    for name in ("dump_seconds", "restore_seconds"):
        if not _is_phases(one.get(name)):
            one.pop(name, None)
    return one


def _is_phases(value: object) -> bool:
    return isinstance(value, dict) and all(isinstance(seconds, int | float) for seconds in value.values())


def newest(entries: list[Entry]) -> dict[str, Entry]:
    """The last result of each row: those of the table in its order, then what other tests recorded."""
    last = {entry["row"]: entry for entry in entries}
    table = {row.name: last.pop(row.name, {"outcome": "not run", "about": row.about}) for row in ALL_ROWS}
    last.pop(RATES, None)
    return {**table, **last}


def seconds(phases: dict[str, float] | None, names: tuple[str, ...]) -> str:
    """'9.0 + 2.6': the phases that took a hundredth of a second or more, named."""
    shown = [f"{name} {phases[name]:.2f}" for name in names if phases and phases.get(name, 0) >= 0.005]
    return ", ".join(shown)


def gib(count: float | None) -> str:
    return f"{count / (1 << 30):.2f}" if count else ""


def number(value: float | None) -> str:
    return f"{value:.2f}" if value else ""


def brief(text: str) -> str:
    """One cell: no line breaks, no column marks, not endless."""
    flat = re.sub(r"\s+", " ", text).replace("|", "\\|")
    return flat if len(flat) <= MOST_WORDS else f"{flat[:MOST_WORDS]} …"


def ratios(entry: Entry) -> str:
    """How often as fast as the plain procedure, and as the cold start."""
    if entry.get("outcome") != "passed" or "ratios" not in entry:
        return ""
    ways = (("", entry["ratios"]), ("--huge-pages: ", entry["ratios_huge_pages"]))
    return "; ".join(
        f"{way}dump {one['dump']:.1f}, restore {one['restore_to_running']:.1f}, cold start {one['cold_start']:.1f}"
        for way, one in ways
    )


def host(entry: Entry) -> str:
    """When and on what."""
    if "time" not in entry:
        return ""
    parts = (entry.get("gpu"), entry.get("driver"), entry.get("criu") and f"CRIU {entry['criu']}")
    return ", ".join([entry["time"][:10], *filter(None, parts)])


COLUMNS = (
    ("row", lambda name, entry: name),
    ("what", lambda name, entry: brief(str(entry.get("about", "")))),
    ("outcome", lambda name, entry: brief(str(entry.get("outcome", "no outcome recorded")))),
    ("GPU GiB", lambda name, entry: gib(entry.get("gpu_memory_bytes"))),
    ("image GiB: raw, stored", lambda name, entry: ", ".join(filter(None, map(gib, (entry.get("raw_bytes"), entry.get("stored_bytes")))))),
    ("dump s", lambda name, entry: seconds(entry.get("dump_seconds"), PHASES["dump"])),
    ("frozen s", lambda name, entry: number(entry.get("frozen_seconds"))),
    ("restore s", lambda name, entry: seconds(entry.get("restore_seconds"), PHASES["restore"])),
    ("to first step s", lambda name, entry: number(entry.get("running_seconds"))),
    ("cold start s", lambda name, entry: number(entry.get("cold_start_seconds"))),
    ("plain procedure: times as long", lambda name, entry: ratios(entry)),
    ("when, where", lambda name, entry: host(entry)),
)  # fmt: skip


def table(rows: dict[str, Entry]) -> str:
    """One line for each row."""
    lines = [[heading for heading, _ in COLUMNS], ["---"] * len(COLUMNS)]
    lines += [[cell(name, entry) for _, cell in COLUMNS] for name, entry in rows.items()]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


@dataclass(frozen=True)
class Floor:
    """The least a phase can take: its bytes over a rate that was measured on the same host."""

    phases: tuple[str, ...]
    of: str
    rate: str

    def least(self, entry: Entry, rates: dict[str, float]) -> float | None:
        """Seconds."""
        count = entry.get(self.of)
        return count / rates[self.rate] if count else None

    def took(self, entry: Entry) -> float:
        """Seconds."""
        found = {**(entry.get("dump_seconds") or {}), **(entry.get("restore_seconds") or {})}
        return sum(found.get(phase, 0.0) for phase in self.phases)


FLOORS = (
    Floor(("gpu_to_host",), "gpu_memory_bytes", "gpu_to_pinned"),
    Floor(("capture",), "raw_bytes", "memory_copy_all"),
    Floor(("capture",), "stored_bytes", "image_write_all"),
    Floor(("criu", "inject"), "raw_bytes", "memory_copy_all"),
    Floor(("host_to_gpu",), "gpu_memory_bytes", "pinned_to_gpu"),
)


def floors(rows: dict[str, Entry], rates: dict[str, float]) -> str:
    """How far each phase is from what the host's own copies would take."""
    lines = [["row", "phase", "bytes", "at the rate of", "least s", "took s", "times"], ["---"] * 7]
    for name, entry in rows.items():
        for floor in FLOORS if entry.get("outcome", "").startswith("passed") else ():
            least, took = floor.least(entry, rates), floor.took(entry)
            if least and took:
                rate = f"{floor.rate} {rates[floor.rate] / 1e9:.1f} GB/s"
                figures = [f"{least:.2f}", f"{took:.2f}", f"{took / least:.1f}"]
                lines.append([name, " + ".join(floor.phases), f"{floor.of} {gib(entry[floor.of])} GiB", rate, *figures])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def drawn(rows: dict[str, Entry]) -> str:
    """A bar for the dump and one for the restore of each row, made of its phases."""
    bars = [(f"{name}: {verb}", parts) for name, entry in rows.items() for verb, parts in _parts(entry)]
    longest = max((sum(took for _, took in parts) for _, parts in bars), default=1.0) or 1.0
    shapes = []
    for at, (text, parts) in enumerate(bars):
        x, y = float(picture.LEFT), 50 + at * 26
        shapes.append(picture.name(y, text))
        for phase, took in parts:
            width = picture.LONGEST * took / longest
            shapes.append(picture.bar(round(x, 1), y, width, COLOURS[phase]))
            x += width
        shapes.append(picture.figure(x + 10, y, f"{sum(took for _, took in parts):.2f} s"))
    legend = " ".join(f'<tspan fill="{colour}">■ {phase}</tspan>' for phase, colour in COLOURS.items())
    return picture.frame("GPU workloads: seconds by phase", legend, shapes, 60 + 26 * len(bars))


def _parts(entry: Entry) -> list[tuple[str, list[tuple[str, float]]]]:
    """[(verb, [(phase, seconds)])] of what a row has measured."""
    found = []
    for verb, names in PHASES.items():
        measured = entry.get(f"{verb}_seconds")
        if measured and entry.get("outcome", "").startswith("passed"):
            found.append((verb, [(name, measured[name]) for name in names if measured.get(name)]))
    return found


def main(arguments: list[str]) -> int:
    """Print the tables, write the picture."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("places", nargs="+", type=Path)
    parser.add_argument("--svg", type=Path)
    options = parser.parse_args(arguments)
    entries = read(options.places)
    rows = newest(entries)
    print(table(rows))
    rates = next((e["rates"] for e in reversed(entries) if e["row"] == RATES and "rates" in e), None)
    if rates is None:
        print("\nThe host's own rates were not measured: no floor.")
    else:
        print(
            f"\nThe floor: bytes over what this host's own copies reach ({int(rates['cores'])} cores).\n\n{floors(rows, rates)}"
        )
    if options.svg:
        options.svg.write_text(drawn(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

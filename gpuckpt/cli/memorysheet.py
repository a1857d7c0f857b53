"""The picture of an image's memory: what is where, and how well it was compressed."""

from __future__ import annotations

from collections.abc import Iterator

from rich.text import Text

from gpuckpt.cli import words
from gpuckpt.cli.sheet import FAINT, Sheet
from gpuckpt.model.inspection import Block, MemoryKind, MemoryPicture, ProcessMemory

SHADES = ((0.75, "as it is", "█", "#"), (0.35, "half", "▓", "="), (0.1, "a fifth", "▒", "-"), (0.0, "less", "░", "."))
"""From which share of its bytes on a block is drawn so: the share, in words, with Unicode, without."""
NOTHING = ("nothing", "·", "0")
"""Zeros, and what another block holds already."""

LABEL_COLUMNS = 12
STRIP_COLUMNS = 96
"""Longer lines are no picture any more."""


def add_memory(sheet: Sheet, memory: MemoryPicture) -> None:
    """Tables by kind and by process, and the picture."""
    held, stored = sum(kind.held for kind in memory.kinds), sum(kind.stored for kind in memory.kinds)
    sheet.heading("Memory", f"{words.size(held)} held, {words.size(stored)} stored{_ratio(held, stored)}")
    rows = [
        _row(kind.kind, kind.held, kind.stored, words.size(kind.zero) if kind.zero else "-") for kind in memory.kinds
    ]
    sheet.table("KIND >HELD >ZERO >STORED RATIO", rows, wrap=False)
    sheet.heading("Picture", f"a block is {words.size(memory.block_bytes)}, in the order of addresses")
    for kind in memory.kinds:
        _add_strip(sheet, kind)
    sheet.line(Text(_legend(unicode=sheet.unicode), FAINT))
    _add_processes(sheet, memory.processes)


def _row(name: str, held: int, stored: int, zero: str) -> tuple[str, ...]:
    ratio = f"{held / stored:.1f}x" if stored else "-"
    return name, words.size(held), zero, words.size(stored), ratio


def _ratio(held: int, stored: int) -> str:
    return f", {held / stored:.1f}x smaller" if stored and held / stored >= 1.05 else ""


def _add_strip(sheet: Sheet, kind: MemoryKind) -> None:
    width = min(sheet.width - 2 - LABEL_COLUMNS, STRIP_COLUMNS)
    drawn = "".join(shade(block, unicode=sheet.unicode) for block in kind.blocks)
    for start in range(0, len(drawn), width):
        name = kind.kind if start == 0 else ""
        sheet.line(Text.assemble((f"{name:<{LABEL_COLUMNS}}", FAINT), (drawn[start : start + width], "blue")))


def shade(block: Block, *, unicode: bool) -> str:
    """The character of a block: the denser, the more is stored of it."""
    if not block.stored:
        return NOTHING[1 if unicode else 2]
    share = block.stored / max(block.held, 1)
    _, _, with_unicode, without = next(one for one in SHADES if share >= one[0])
    return with_unicode if unicode else without


def _legend(*, unicode: bool) -> str:
    return "stored: " + ", ".join(_legend_items(unicode=unicode))


def _legend_items(*, unicode: bool) -> Iterator[str]:
    for _, word, with_unicode, without in SHADES:
        yield f"{with_unicode if unicode else without} {word}"
    yield f"{NOTHING[1 if unicode else 2]} {NOTHING[0]} (zeros, or there already)"


def _add_processes(sheet: Sheet, processes: tuple[ProcessMemory, ...]) -> None:
    ordered = sorted(processes, key=lambda one: -one.held)
    rows = [(str(one.pid), words.size(one.held), words.size(one.stored)) for one in ordered]
    sheet.heading("By process", "what an earlier one has stored counts there")
    sheet.table(">PID >HELD STORED", rows, wrap=False)

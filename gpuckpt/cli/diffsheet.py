"""The screen of inspect --diff: what two images do not have alike."""

from __future__ import annotations

from itertools import groupby

from rich.text import Text

from gpuckpt.cli import words
from gpuckpt.cli.sheet import BAD, FAINT, GOOD, UNSURE, Cell, Sheet, bar
from gpuckpt.model.inspection import Comparison, Difference, MemoryChange
from gpuckpt.model.manifest import Manifest

BAR_WIDTH = 24
ONE_LINE = 60


def difference_verdict(comparison: Comparison, here: Manifest) -> Text:
    """Which of the two is older, in one line."""
    if comparison.image_id == here.image_id:
        return Text("the same image", GOOD)
    apart = here.created - comparison.created
    order = "after" if apart >= 0 else "before"
    return Text(f"made {words.duration(abs(apart))} {order} {words.safe(comparison.other)}")


def add_comparison(sheet: Sheet, comparison: Comparison) -> None:
    """Memory first, then the groups in which something differs."""
    _add_memory(sheet, comparison.memory)
    for group, members in groupby(comparison.differences, key=lambda one: one.group):
        sheet.heading(group[:1].upper() + group[1:])
        sheet.table("IS WHAT", [_difference(one) for one in members])
    if not comparison.differences:
        sheet.heading("All else", "alike")


def _difference(one: Difference) -> tuple[Cell, Cell]:
    text = Text(words.safe(one.name))
    if one.other and one.here:
        values = f"{words.safe(one.other)} -> {words.safe(one.here)}"
        text.append(f"{_joint(one.name, values)}{values}")
        return Text("other", UNSURE), text
    value = words.safe(one.other or one.here)
    text.append(f"{_joint(one.name, value)}{value}", FAINT)
    return (Text("new", GOOD) if one.here else Text("gone", BAD)), text


def _joint(name: str, value: str) -> str:
    """On one line where both are short."""
    return "  " if len(name) + len(value) < ONE_LINE else "\n"


def _add_memory(sheet: Sheet, memory: tuple[MemoryChange, ...]) -> None:
    if not memory:
        return
    held = sum(one.held for one in memory)
    known = [one.changed for one in memory if one.changed is not None]
    if len(known) == len(memory):
        share = f"{sum(known) / held:.0%}" if held else "nothing"
        note = f"{words.size(sum(known))} of {words.size(held)} is not in the other image: {share}, in whole frames"
    else:
        note = "an image made with --plain has no digests to compare"
    sheet.heading("Memory", note)
    sheet.table("KIND >OTHER >HERE >CHANGED SHARE", [_row(sheet, one) for one in memory], wrap=False)


def _row(sheet: Sheet, one: MemoryChange) -> tuple[Cell, ...]:
    sizes = one.kind, words.size(one.other_held), words.size(one.held)
    if one.changed is None:
        return (*sizes, "?", "")
    share = one.changed / one.held if one.held else 0.0
    return (*sizes, words.size(one.changed), Text(bar(share, BAR_WIDTH, unicode=sheet.unicode), "blue"))

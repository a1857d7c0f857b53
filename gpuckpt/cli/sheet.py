"""A sheet of headings, facts and tables, drawn at once: what `inspect` and `--dry-run` fill."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import TextIO

from rich.console import RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from gpuckpt.cli.canvas import columns_of, draw
from gpuckpt.cli.manner import is_terminal, speaks_unicode
from gpuckpt.cli.words import safe

GOOD, BAD, UNSURE, FAINT, TITLE = "green", "bold red", "yellow", "dim", "bold"
FEW = 10
"""Lines of a list that are shown without --all."""

WIDEST = 28
"""No column but the last is wider."""
NARROWEST = 16
"""The last column is at least so wide, and the screen overflows if need be."""

Cell = str | Text


class Sheet:
    """Collects what a screen shows. Every text that came from outside passes `safe` on its way in."""

    def __init__(self, *, all_lines: bool, stream: TextIO | None = None) -> None:
        self.stream = sys.stdout if stream is None else stream
        self.all_lines = all_lines
        self.width = columns_of(self.stream)
        self.unicode = speaks_unicode(self.stream)
        self._items: list[RenderableType] = []

    def draw(self) -> None:
        """Put the sheet on its stream."""
        draw(self.stream, *self._items)

    def title(self, kind: str, name: str, verdict: Text) -> None:
        """The first two lines: what this is, and what can be done with it."""
        self._items += [Text.assemble((f"{kind}  ", FAINT), (safe(name), TITLE)), Padding(verdict, (0, 0, 0, 2))]

    def heading(self, title: str, note: str = "") -> None:
        """A heading with a short summary beside it."""
        self._items.append(
            Padding(Text.assemble((title, TITLE), (f"  {safe(note)}" if note else "", FAINT)), (1, 0, 0, 0))
        )

    def line(self, text: Cell) -> None:
        """One line of plain text."""
        self._items.append(Padding(cell(text), (0, 0, 0, 2)))

    def foot(self, text: str) -> None:
        """A quiet last line, an empty one above it."""
        self._items.append(Padding(Text(safe(text), FAINT), (1, 0, 0, 0)))

    def facts(self, pairs: Iterable[tuple[str, Cell]]) -> None:
        """Names and values in two columns; empty values are left out."""
        grid = Table.grid(padding=(0, 2))
        grid.add_column(style=FAINT, no_wrap=True)
        grid.add_column(overflow="fold")
        for name, value in pairs:
            if value:
                grid.add_row(name, cell(value))
        self._items.append(Padding(grid, (0, 0, 0, 2)))

    def table(self, columns: str, rows: Sequence[Sequence[Cell]], *, wrap: bool = True) -> None:
        """A table without lines. `columns` are names; '>' before one aligns it right; the last takes the rest.

        More than FEW rows are cut unless the sheet shows all lines.
        """
        if not rows:
            return
        wrap = wrap or not is_terminal(self.stream)  # a file has room for all of it
        grid = Table(box=None, padding=(0, 2, 0, 0), header_style=FAINT, pad_edge=False)
        names = columns.split()
        for number, width in enumerate(self._widths(names, rows), 1):
            name, last = names[number - 1], number == len(names)
            grid.add_column(
                name.lstrip(">"),
                justify="right" if name.startswith(">") else "left",
                no_wrap=not (last and wrap),
                overflow="fold" if last and wrap else "ellipsis",
                width=width,
            )
        shown = rows if self.all_lines or len(rows) <= FEW + 1 else rows[:FEW]
        for row in shown:
            grid.add_row(*(cell(value) for value in row))
        self._items.append(Padding(grid, (0, 0, 0, 2)))
        if len(shown) < len(rows):
            self.line(Text(f"and {len(rows) - len(shown)} more; --all shows all", FAINT))

    def _widths(self, names: Sequence[str], rows: Sequence[Sequence[Cell]]) -> list[int]:
        """As wide as their cells; only the last column gives way (rich would take from all)."""
        cells = [[cell(value).cell_len for value in column] for column in zip(*rows, strict=True)]
        natural = [max(len(name.lstrip(">")), *lengths) for name, lengths in zip(names, cells, strict=True)]
        widths = [min(width, WIDEST) for width in natural[:-1]]
        room = self.width - 2 - sum(widths) - 2 * len(widths)
        return [*widths, max(min(natural[-1], room), NARROWEST)]


def cell(value: Cell) -> Text:
    """A cell: drawn text as it is, foreign text made safe."""
    return value if isinstance(value, Text) else Text(safe(value))


def bar(share: float, width: int, *, unicode: bool) -> str:
    """A bar of up to `width` characters."""
    return ("█" if unicode else "#") * max(round(share * width), 1 if share > 0 else 0)

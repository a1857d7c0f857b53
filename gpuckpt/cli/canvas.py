"""Where text goes: drawing into memory first, then writing it, with no failure that could hide a result."""

from __future__ import annotations

import errno
import io
import os
import shutil
import sys
from typing import TYPE_CHECKING, TextIO

from gpuckpt.cli.manner import DEFAULT_COLUMNS, is_terminal, speaks_unicode
from gpuckpt.model.errors import in_words

if TYPE_CHECKING:
    from rich.console import Console, RenderableType


class _Page(io.StringIO):
    """Memory that claims the encoding of the stream it will be written to: rich chooses its boxes by it."""

    def __init__(self, encoding: str) -> None:
        super().__init__()
        self._encoding = encoding

    @property
    def encoding(self) -> str:  # type: ignore[override]  # io.StringIO's is always None
        return self._encoding


def columns_of(stream: TextIO | None) -> int:
    """How wide a screen may be: the terminal's width, a fixed one for files and pipes."""
    if not is_terminal(stream):
        return DEFAULT_COLUMNS
    return max(shutil.get_terminal_size((DEFAULT_COLUMNS, 24)).columns, 40)


def console_for(stream: TextIO | None) -> Console:
    """A console that draws into memory, as wide and as colourful as the stream."""
    from rich.console import Console  # noqa: PLC0415  only where something is drawn

    page = _Page("utf-8" if speaks_unicode(stream) else "ascii")
    return Console(
        file=page,
        force_terminal=is_terminal(stream),
        width=columns_of(stream),
        highlight=False,
        markup=False,
        emoji=False,
        soft_wrap=False,
    )


def draw(stream: TextIO | None, *drawings: RenderableType) -> None:
    """Draw onto a stream."""
    console = console_for(stream)
    for drawing in drawings:
        console.print(drawing)
    page = console.file
    assert isinstance(page, _Page)  # noqa: S101  made above
    # Rich pads cells; blanks at the end of a line only hurt who copies it.
    write(stream, "".join(f"{line.rstrip()}\n" for line in page.getvalue().splitlines()))


def write(stream: TextIO | None, text: str) -> None:
    """Write and flush. A reader that went away or a full disk is said on stderr and changes nothing else.

    The exit status speaks about the process that was saved or restored, not about the paper it is written on.
    """
    if stream is None:
        return
    if not speaks_unicode(stream):
        # Rich cuts with an ellipsis; anything else foreign is shown by its code.
        text = text.replace("\N{HORIZONTAL ELLIPSIS}", "~").encode("ascii", "backslashreplace").decode()
    try:
        stream.write(text)
        stream.flush()
    except (OSError, ValueError) as error:
        _abandon(stream)
        if stream is not sys.stderr and getattr(error, "errno", None) != errno.EPIPE:
            write(sys.stderr, f"gpuckpt: the result could not be written to stdout: {in_words(error)}\n")


def _abandon(stream: TextIO) -> None:
    # What is left in the buffer would fail again at exit, as status 120.
    try:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
    except (OSError, ValueError):
        return

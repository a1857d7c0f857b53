"""How this run talks: for a person or a program, how much, and to which kind of streams."""

from __future__ import annotations

import os
import sys
from typing import TextIO

from gpuckpt.model.records import dataclass

DEFAULT_COLUMNS = 100
"""The width of tables that go into a file or a pipe."""

SECTIONS = ("files", "sockets", "memory", "gpus", "environment", "timings")
"""What inspect has options for."""


@dataclass(frozen=True, slots=True)
class Manner:
    """The options of one run that change how it talks."""

    json: bool = False
    quiet: bool = False
    verbose: bool = False
    dry_run: bool = False
    one_line: bool = False
    """A run that comes again and again: without a terminal a failure is one line, for cron's mail and the journal."""
    shares_terminal: bool = False
    """The restored job writes to this terminal too (--wait): nothing may be drawn over it."""
    sections: tuple[str, ...] = ()
    """What inspect shall show instead of its first screen: some of SECTIONS, in their order."""
    everything: bool = False
    """inspect shall show its first screen, all sections, and every line of them."""

    @property
    def silent(self) -> bool:
        """Success says nothing: asked for, or nobody is there to read it (cron)."""
        if self.verbose:
            return False
        return self.quiet or not (is_terminal(sys.stdout) or is_terminal(sys.stderr))


def is_terminal(stream: TextIO | None) -> bool:
    """True for a terminal; a stream that is closed or absent is none."""
    try:
        return stream is not None and stream.isatty()
    except ValueError:
        return False


def speaks_unicode(stream: TextIO | None) -> bool:
    """True if boxes and bullets arrive as such on this stream.

    In a C locale Python switches to UTF-8 all the same (PEP 538, PEP 540), so the encoding alone
    does not tell; its UTF-8 mode does, unless that was asked for.
    """
    encoding = (getattr(stream, "encoding", None) or "ascii").lower()
    in_c_locale = bool(sys.flags.utf8_mode) and os.environ.get("PYTHONUTF8") != "1"
    return "utf" in encoding and not in_c_locale

"""Digests of files on a host that has no gpuckpt, by programs that it may have: their commands, and what they answer.

Names go to a shell there: they are quoted.
"""

from __future__ import annotations

import re
import shlex
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

B3SUM = "b3sum"
SHA256 = ("openssl", "sha256sum")
"""coreutils' own is the slower one, by five times where the processor has instructions for SHA-256."""

PROGRAMS = {
    B3SUM: ("b3sum", "--"),
    "openssl": ("openssl", "dgst", "-sha256", "-r"),
    "sha256sum": ("sha256sum", "--"),
}
"""The words before the names of files, which are absolute."""

NOT_EXECUTABLE, NOT_FOUND = 126, 127
"""A shell's words for a program that cannot be run."""

LINE = re.compile(rb"\\?([0-9a-f]{64}) [ *]")


def command_of(program: str, names: Sequence[str]) -> str:
    """The command for a shell there."""
    return shlex.join([*PROGRAMS[program], *names])


def is_command(text: str) -> bool:
    """Whether `command_of` gives this text: a program of these with names, and nothing else for a shell to do."""
    try:
        words = shlex.split(text)
    except ValueError:
        return False
    for start in PROGRAMS.values():
        names = words[len(start) :]
        if words == [*start, *names]:
            return bool(names) and all(name.startswith("/") for name in names) and shlex.join(words) == text
    return False


def digests(answer: bytes, count: int) -> list[str] | None:
    """What it said of `count` files, a line for each with its digest in front; None where it said something else."""
    matches = [LINE.match(line) for line in answer.splitlines()]
    if len(matches) != count:
        return None
    found = [match[1].decode() for match in matches if match is not None]
    return found if len(found) == count else None

"""Digests of files on a host that has no gpuckpt, by programs that it may have: their commands, and what they answer.

Names go to a shell there: they are quoted.
"""

from __future__ import annotations

import re
import shlex
from typing import TYPE_CHECKING

from gpuckpt.stores.protocol import PIECE_BYTES

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

_OF_INPUT = " ".join(f'"{" ".join(word for word in words if word != "--")}"' for words in PROGRAMS.values())

_LOOP = f"""\
for p in {_OF_INPUT}; do echo | $p >/dev/null 2>&1 && break; p=; done
echo "${{p%% *}}"
while read -r at count name; do
dd if="$name" bs={PIECE_BYTES} skip="$at" count="$count" 2>/dev/null | $p || echo
done"""

RANGES = shlex.join(["exec", "sh", "-c", _LOOP])
"""The command of a loop: says the name of the first program that can be run, then for each line "AT COUNT NAME" that it
reads the digest of COUNT times PIECE_BYTES of a file, from the AT-th on. dd seeks where tail may read what is before.
"""

NOT_EXECUTABLE, NOT_FOUND = 126, 127
"""A shell's words for a program that cannot be run."""

LINE = re.compile(rb"\\?([0-9a-f]{64}) [ *]")


def command_of(program: str, names: Sequence[str]) -> str:
    """The command for a shell there."""
    return shlex.join([*PROGRAMS[program], *names])


def program_of(line: bytes) -> str:
    """Which program the loop has found; '' for anything else that is said."""
    name = line.decode("ascii", "replace")
    return name if name in PROGRAMS else ""


def is_command(text: str) -> bool:
    """Whether it is RANGES, or a text of `command_of`: a program of these with names, and nothing else to do."""
    if text == RANGES:
        return True
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

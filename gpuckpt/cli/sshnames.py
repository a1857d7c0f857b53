"""The hosts that ssh knows by name, for TAB: from its configuration and known hosts; nothing is connected to.

Plain names alone: no patterns, no hashed ones. What paramiko has for this takes 0.2 s to load.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

DEEPEST_INCLUDE = 16
"""As ssh's own limit."""
MOST_BYTES = 4 << 20
"""Of one file: TAB must stay fast."""

SYSTEM = Path("/etc/ssh")
_LINE = re.compile(r"\s*(\w+)(?:\s*=\s*|\s+)(.*)")
_WORD = re.compile(r'"([^"]*)"|(\S+)')
_PLAIN = re.compile(r"[\w.][\w.-]*")
"""No pattern, no negation, no address that needs brackets, nothing that a shell would take apart."""


def ssh_hosts(home: Path, system: Path = SYSTEM) -> list[str]:
    """Names in order, each once. Files that cannot be read have none."""
    own = home / ".ssh"
    found = [*_configured(own / "config", own, home), *_configured(system / "ssh_config", system, home)]
    for path in (own / "known_hosts", own / "known_hosts2", system / "ssh_known_hosts"):
        found += _known(path)
    return sorted({name for name in found if _PLAIN.fullmatch(name)})


def _configured(path: Path, base: Path, home: Path, depth: int = 0) -> Iterator[str]:
    """The names behind Host, in what is included too; relative names of those lie in `base`."""
    for line in _lines(path):
        match = _LINE.fullmatch(line)
        keyword, rest = (match[1].lower(), match[2]) if match else ("", "")
        words = [quoted or bare for quoted, bare in _WORD.findall(rest)]
        if keyword == "host":
            yield from words
        elif keyword == "include" and depth < DEEPEST_INCLUDE:
            for included in (one for word in words for one in _matching(word, base, home)):
                yield from _configured(included, base, home, depth + 1)


def _matching(pattern: str, base: Path, home: Path) -> list[Path]:
    import glob  # noqa: PLC0415  few have an Include

    place = home / pattern[2:] if pattern.startswith("~/") else base / pattern
    return [Path(name) for name in sorted(glob.glob(str(place)))]  # noqa: PTH207 - the pattern may be absolute


def _known(path: Path) -> Iterator[str]:
    for line in _lines(path):
        words = line.split()
        if words and words[0] == "@cert-authority":
            continue  # a pattern, whoever it is for
        if words and not words[0].startswith(("#", "|", "@")):
            yield from words[0].split(",")


def _lines(path: Path) -> list[str]:
    try:
        # Non-blocking: a FIFO of this name must not hold the shell.
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), errors="replace") as file:
            return file.read(MOST_BYTES).splitlines()
    except OSError:
        return []

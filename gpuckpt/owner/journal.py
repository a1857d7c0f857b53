"""The journal of one run, written before each act, so that any survivor knows what may be half done.

It lies in the run's directory below /run/gpuckpt, one JSON object a line. /run is a tmpfs: it is
gone after a reboot, and so are the processes it speaks of.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from pathlib import Path
from typing import Any

FILE_NAME = "journal"
MAX_BYTES = 64 << 20


RESERVED_BYTES = 64 << 10
"""Taken at the start, so that a /run that fills up meanwhile cannot stop the journal, or the unwind that it serves."""


class Journal:
    """Every line is on its way to the kernel before the act it announces begins. Writing never raises."""

    def __init__(self, run_directory: Path) -> None:
        """Open it after what it holds; raises OSError when /run has no room."""
        self._fd = os.open(run_directory / FILE_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._end = len(os.pread(self._fd, MAX_BYTES, 0).rstrip(b"\0"))
        os.posix_fallocate(self._fd, self._end, RESERVED_BYTES)

    def write(self, act: str, **facts: Any) -> None:
        """Note that `act` is about to begin (or, for a result, has been seen)."""
        line = json.dumps({"act": act, "time": time.time(), **facts}).encode() + b"\n"
        with contextlib.suppress(OSError):
            self._end += os.pwrite(self._fd, line, self._end)

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)


class PastRun:
    """What a journal says of a run that has ended, or not."""

    def __init__(self, lines: list[dict[str, Any]]) -> None:
        self.lines = lines

    def has(self, act: str) -> bool:
        """Whether an act was begun."""
        return any(line.get("act") == act for line in self.lines)

    def last(self, act: str) -> dict[str, Any] | None:
        """The latest line of an act."""
        return next((line for line in reversed(self.lines) if line.get("act") == act), None)


def read(run_directory: Path) -> PastRun:
    """Read a journal; a last line that a crash cut short is dropped. A missing journal is an empty one."""
    try:
        raw = (run_directory / FILE_NAME).read_bytes()
    except OSError:
        return PastRun([])
    lines = []
    for text in raw.replace(b"\0", b"").split(b"\n"):
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if isinstance(line, dict):
            lines.append(line)
    return PastRun(lines)

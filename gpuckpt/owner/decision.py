"""The decision about a copy of a job that stands ready on this host: it runs (`go`), or it never will (`cancelled`).

Whoever is first decides, for good: the copy's owner just before it lets go, or another gpuckpt of this host that is
asked what became of a `go` whose answer was lost. So a `go` that was under way for long cannot start a copy after the
other host was told that there is none. /run is a tmpfs: after a reboot there is neither a decision nor a copy.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from typing import TYPE_CHECKING, Literal

from gpuckpt.model.facts import ProcessId
from gpuckpt.model.records import dataclass
from gpuckpt.owner.runs import make_runtime

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

Word = Literal["go", "cancelled"]
NAME = re.compile(r"[0-9a-f]{16,64}")
KEPT_SECONDS = 7 * 86400.0


@dataclass(frozen=True, slots=True)
class Decision:
    """What stands."""

    word: Word
    ids: tuple[ProcessId, ...]
    """Of a copy that was let go."""


def decide(transaction: str, word: Word, ids: Sequence[ProcessId] = ()) -> Decision:
    """Decide, unless that was done; returns what stands. Raises OSError, ValueError for no transaction's name."""
    if not NAME.fullmatch(transaction):
        raise ValueError(transaction)
    directory = make_runtime("decisions")
    target, new = directory / transaction, directory / f".{os.urandom(8).hex()}"
    said = {"word": word, "ids": [[one.pid, one.start_ticks] for one in ids]}
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(json.dumps(said))
        # A link appears whole or not at all, and only where nothing is.
        with contextlib.suppress(FileExistsError):
            os.link(new, target)
    finally:
        new.unlink()
    return _read(target)


def _read(path: Path) -> Decision:
    said = json.loads(path.read_text())
    word: Word = "go" if said["word"] == "go" else "cancelled"
    return Decision(word, tuple(ProcessId(pid, ticks) for pid, ticks in said["ids"]))


def forget(transaction: str) -> None:
    """The other host knows how it ended. Raises OSError, ValueError."""
    if not NAME.fullmatch(transaction):
        raise ValueError(transaction)
    (make_runtime("decisions") / transaction).unlink(missing_ok=True)


def forget_old() -> None:
    """Remove decisions that nobody will ask about any more. Raises OSError."""
    for path in make_runtime("decisions").iterdir():
        with contextlib.suppress(FileNotFoundError):
            if time.time() - path.stat().st_mtime > KEPT_SECONDS:
                path.unlink()

"""protected.json beside the manifest: where verified copies of an image lie, since when.

The age of the last protected image is the work that would have to be repeated if this host died now.
"""

from __future__ import annotations

import json
import os
import time
from typing import TYPE_CHECKING

from gpuckpt.model.inspection import Copy
from gpuckpt.model.jsonform import FormError, from_json, to_json
from gpuckpt.model.records import dataclass

if TYPE_CHECKING:
    from pathlib import Path

NAME = "protected.json"
_NEW = "protected.json.new"
NAMES = (NAME, _NEW)
MAX_BYTES = 1 << 20
MOST = 100
"""Older notes than this many are dropped."""


@dataclass(frozen=True, slots=True)
class _Copies:
    copies: tuple[Copy, ...] = ()


def read(root: Path) -> tuple[Copy, ...]:
    """The copies noted; none where the note is missing or unreadable: it decides nothing."""
    try:
        descriptor = os.open(root / NAME, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as file:
            return parse(file.read(MAX_BYTES))
    except OSError:
        return ()


def parse(raw: bytes) -> tuple[Copy, ...]:
    """The copies that a note tells of; none where it cannot be read."""
    try:
        return from_json(_Copies, json.loads(raw)).copies
    except (ValueError, RecursionError, FormError):
        return ()


def note(root: Path, host: str, path: str, verified: str) -> None:
    """Add a copy, in place of an older note about the same place. Raises OSError."""
    now = Copy(host, path, time.time(), verified)
    others = [copy for copy in read(root) if (copy.host, copy.path) != (host, path)]
    new = root / _NEW
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(json.dumps(to_json(_Copies((*others, now)[-MOST:])), indent=1).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())
    new.replace(root / NAME)

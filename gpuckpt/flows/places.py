"""The files that a restored tree's standard streams shall lead to, looked at before anything is touched."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from gpuckpt.model.errors import NotFound

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

OPTIONS = {0: "--stdin", 1: "--stdout", 2: "--stderr"}


def require_places(stdio: Mapping[int, Path]) -> None:
    """Raises NotFound for the first file that cannot be opened: input that is missing, output without a directory."""
    for number, path in sorted(stdio.items()):
        what = f"{OPTIONS[number]} {path}"
        # os.path: a place may lie where this user may not look.
        if os.path.isdir(path):  # noqa: PTH112
            raise NotFound(f"{what}: it is a directory", "name a file")
        if number == 0 and not os.path.exists(path):  # noqa: PTH110
            raise NotFound(f"{what}: there is no such file", "name a file that exists, or /dev/null")
        if not os.path.isdir(path.parent):  # noqa: PTH112
            raise NotFound(f"{what}: there is no directory {path.parent}", f"make it first: mkdir -p {path.parent}")

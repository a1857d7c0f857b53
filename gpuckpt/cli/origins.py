"""Which file gave a value that is refused: who has not typed it looks for it in vain on the command line."""

from __future__ import annotations

import re
from contextvars import ContextVar
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gpuckpt.cli.config import Setting, Table
    from gpuckpt.model.errors import GpuckptError

untyped: ContextVar[Table] = ContextVar("untyped", default={})  # noqa: B039 - nobody changes it
"""The settings of the command that runs which come from files, by long name."""


def trace(error: GpuckptError) -> None:
    """Add to the hint which file gives an option, or the path of one, that the message names."""
    named = set(re.findall(r"--([a-z-]*[a-z])", error.message))
    found = [
        f"{name} comes from {setting.path}"
        for name, setting in sorted(untyped.get().items())
        if name in named or _stands_in(error.message, setting)
    ]
    error.hint = "; ".join(filter(None, (error.hint, *found)))


def _stands_in(message: str, setting: Setting) -> bool:
    """Only paths: other values are words like any."""
    value = setting.value
    return isinstance(value, str) and value.startswith("/") and f"{value} " in f"{message} "

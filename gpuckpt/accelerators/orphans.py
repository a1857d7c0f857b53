"""A probe may hang in a driver for ever, so it ends with the thread that has started it, whatever ends that one."""

from __future__ import annotations

import ctypes
import os
import signal
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

_CHILD_OF = "--child-of="
_PR_SET_PDEATHSIG = 1
"""Of prctl(2): the signal that comes when the thread ends that has started this process."""


def child_of_us() -> str:
    """The argument by which a probe knows who has started it."""
    return f"{_CHILD_OF}{os.getpid()}"


def end_with_parent(arguments: Sequence[str]) -> None:
    """From here on this process is killed when its parent's thread ends; it ends now where it has come too late."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    parents = [int(word[len(_CHILD_OF) :]) for word in arguments if word.startswith(_CHILD_OF)]
    if any(parent != os.getppid() for parent in parents):
        os._exit(1)

"""Namespaces from outside: named networks and what is in them, and whom orphans go to."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

NETWORKS = Path("/run/netns")
"""Where ip-netns(8) keeps the names."""
PR_SET_CHILD_SUBREAPER = 36
WALL = 0x40000000
CLONE_NEWNET = 0x40000000

T = TypeVar("T")

_libc = ctypes.CDLL(None, use_errno=True)


def network(name: str) -> Path:
    """The file that stands for a named network namespace."""
    return NETWORKS / name


def networks() -> list[str]:
    """The network namespaces that have a name."""
    with contextlib.suppress(OSError):
        return sorted(path.name for path in NETWORKS.iterdir())
    return []


def take_orphans() -> None:
    """Processes below us whose parent ends become our children, not init's: we can wait for them (prctl(2))."""
    _libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def reap_all() -> None:
    """Collect every child and every thread held by us that has ended."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG | WALL)[0]:
            pass


def in_network(network: Path, look: Callable[[], T]) -> T:
    """What `look` finds in another network namespace; it runs in a thread of its own, which alone goes there.

    Raises OSError where the namespace cannot be entered, and what `look` raises.
    """
    from concurrent.futures import ThreadPoolExecutor  # noqa: PLC0415  few runs need one

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(_look_there, network, look).result()


def _look_there(network: Path, look: Callable[[], T]) -> T:
    descriptor = os.open(network, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if _libc.setns(descriptor, CLONE_NEWNET) != 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code), str(network))
    finally:
        os.close(descriptor)
    return look()

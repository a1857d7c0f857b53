"""Packets of the connections that a restore keeps, held back until its tree runs.

The table is named after the run, whose directory says that there may be one: as long as the run is at work it is
wanted, afterwards whoever removes the directory, or finds it, removes the table first.

steps, and what a crash at each leaves:

1. the directory says so      nothing is held back yet
2. the table is made          the owner, once the tree runs; or who settles the run (owner/runs.py), or the next one
3. the table is removed       the directory still says so: removing it again does nothing
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from gpuckpt.system import netfilter, netlock

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

MARK = "network-lock"
"""In the directory of a run."""


def hold_back(run_directory: Path, connections: Sequence[netlock.Connection]) -> list[str]:
    """Drop what these connections send and are sent; a note where that was not possible. Never raises."""
    if not connections:
        return []
    try:
        (run_directory / MARK).touch()
        netlock.hold_back(_name(run_directory), connections)
    except (OSError, ValueError) as error:
        why = (error.strerror if isinstance(error, OSError) else None) or str(error)
        words = f"packets of the kept connections could not be held back until the tree was there: {why}"
        return [f"{words}; one whose other end spoke in that time has ended"]
    return []


def let_through(run_directory: Path) -> None:
    """Where that run holds anything back, it does so no more. Never raises; may be repeated."""
    if is_held_back(run_directory):
        with contextlib.suppress(OSError):
            netfilter.delete_table(netfilter.INET, _name(run_directory))
            (run_directory / MARK).unlink(missing_ok=True)


def is_held_back(run_directory: Path) -> bool:
    """Whether that run may hold something back."""
    return (run_directory / MARK).exists()


def _name(run_directory: Path) -> str:
    return f"gpuckpt-{run_directory.name}"

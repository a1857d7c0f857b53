"""A cgroup of its own for a restored tree, so that it outlives the ssh session, unit or cron job it came from.

A systemd scope where systemd is pid 1 (a bare directory below its tree would be its prey), else a
cgroup v2 directory.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

from gpuckpt.system import commands

PARENT = "gpuckpt"

FRESH_SECONDS = 600.0
"""So long after its making nobody waits any more for a CRIU to move into a cgroup."""


class OwnCgroup:
    """A cgroup v2 directory `gpuckpt/NAME`."""

    def __init__(self, mount: Path, name: str) -> None:
        """Create it; raises OSError where that is not allowed."""
        self.path = mount / PARENT / name
        self.path.mkdir(parents=True, exist_ok=True, mode=0o755)

    def join(self) -> None:
        """Move the calling process in: CRIU's children are then born there.

        Called between fork and exec. Where the kernel refuses it (threaded or delegated cgroups, limits), the
        tree stays in ours; the restore says so.
        """
        with contextlib.suppress(OSError):
            (self.path / "cgroup.procs").write_text("0")

    def kill(self) -> None:
        """End everything in it, stopped tasks too (cgroup.kill, kernel 5.14)."""
        with contextlib.suppress(OSError):
            (self.path / "cgroup.kill").write_text("1")

    def remove(self) -> None:
        """Remove it when it is empty."""
        with contextlib.suppress(OSError):
            self.path.rmdir()


def remove_empty(mount: Path) -> None:
    """Remove the directories of restored trees that have ended since; a fresh one waits for its tree."""
    with contextlib.suppress(OSError):
        for entry in os.scandir(mount / PARENT):
            with contextlib.suppress(OSError):
                if entry.is_dir() and entry.stat().st_mtime < time.time() - FRESH_SECONDS:
                    os.rmdir(entry.path)  # noqa: PTH106 - entry of scandir


def scope_prefix(name: str) -> list[str]:
    """The argv prefix that starts a program in a systemd scope of its own (it stays our child)."""
    program = commands.find_program("systemd-run")
    if program is None:
        return []
    return [str(program), "--scope", "--quiet", "--collect", f"--unit=gpuckpt-{name}", "--"]

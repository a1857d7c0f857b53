"""The gate: nothing ends or comes alive through CRIU before the owner has said `commit`.

A successful `criu dump` ends the tree by itself, and a successful `criu restore` lets it run. So CRIU
gets an action script that connects to the owner's socket at post-dump (images complete, every task
still stopped) and at post-restore (memory in, no instruction run), and waits for the answer.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import socket
import sys
from pathlib import Path

from gpuckpt.owner import gate_client

STAGES = ("post-dump", "post-restore")

COMMIT = b"C"


class Gate:
    """The owner's side: a listening socket, the action script that leads to it, and the one caller."""

    def __init__(self, run_directory: Path) -> None:
        self.address = run_directory / "gate"
        self.script = _write_script(run_directory)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(self.address))
        self._listener.listen(1)
        self._caller: socket.socket | None = None

    def fileno(self) -> int:
        """For select: readable when CRIU's script has come, and again if it goes."""
        return self._listener.fileno() if self._caller is None else self._caller.fileno()

    def accept(self) -> None:
        """Take the caller in: from here on CRIU waits for the answer."""
        self._caller, _ = self._listener.accept()

    @property
    def has_caller(self) -> bool:
        """CRIU stands at the gate."""
        return self._caller is not None

    def commit(self) -> bool:
        """Let CRIU pass; False when its script is gone (killed: CRIU takes that as an abort)."""
        if self._caller is None:
            return False
        try:
            self._caller.sendall(COMMIT)
        except OSError:
            return False
        return True

    def close(self) -> None:
        """Close both ends; without a commit before, this is the abort."""
        if self._caller is not None:
            self._caller.close()
        self._listener.close()


def remove_script(run_directory: Path) -> None:
    """Remove the script of a run, wherever it had to lie: an owner that was killed could not."""
    for place in _places(run_directory):
        with contextlib.suppress(OSError):
            (place / _script_name(run_directory)).unlink(missing_ok=True)


def _script_name(run_directory: Path) -> str:
    return f"gpuckpt-gate-{run_directory.name}"


def _places(run_directory: Path) -> tuple[Path, ...]:
    return (run_directory, Path("/var/lib/gpuckpt"), Path("/root"), Path("/var/tmp"))  # noqa: S108 - see O_EXCL


def _write_script(run_directory: Path) -> Path:
    """CRIU's --action-script takes one executable file and calls it at every stage: the shell sorts out quickly."""
    python, client = shlex.quote(sys.executable), shlex.quote(str(Path(gate_client.__file__)))
    stages = "|".join(STAGES)
    text = f'#!/bin/sh\ncase "$CRTOOLS_SCRIPT_ACTION" in\n{stages}) exec {python} -I -S {client} ;;\nesac\nexit 0\n'
    script = _executable_place(run_directory) / _script_name(run_directory)
    script.unlink(missing_ok=True)
    descriptor = os.open(script, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o700)
    os.write(descriptor, text.encode())
    os.close(descriptor)
    return script


def _executable_place(run_directory: Path) -> Path:
    """The first directory from which programs may be started: Debian mounts /run with noexec."""
    for place in _places(run_directory):
        if place.is_dir() and not os.statvfs(place).f_flag & os.ST_NOEXEC:
            return place
    return run_directory

"""Which process is meant: by its pid, by the file that holds it, or by the systemd unit whose main process it is."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from gpuckpt.flows import gather
from gpuckpt.model.errors import MachineLacks, NotFound
from gpuckpt.system import commands, procfs
from gpuckpt.system.files import open_plain

if TYPE_CHECKING:
    from pathlib import Path

SYSTEMCTL_SECONDS = 10.0
MOST_BYTES = 4096
MOST_PID = 1 << 22
LOOK = "look at it with `ls -l`, or say --tree PID"
SLACK_SECONDS = 2.0
"""Boot time is known to the second, and a clock may be corrected by that much."""


def pid_of(pid: int, pid_file: Path | None, unit: str | None) -> int:
    """The pid. Raises NotFound, MachineLacks."""
    if pid_file is not None:
        return pid_in_file(pid_file)
    return main_pid(unit) if unit is not None else pid


def pid_in_file(path: Path) -> int:
    """The pid that a file holds, if it can still be the one that was meant. Raises NotFound.

    A file that is older than its process was written for another one, whose number has been given out again. A tree
    that gpuckpt has brought back is younger than its file, and the one that was meant.
    """
    text, written = _read(path)
    word = text.strip().partition("\n")[0].strip()  # some programs (PostgreSQL) write more lines
    if not (word.isascii() and word.isdigit() and 0 < int(word) <= MOST_PID):
        what = "it is empty" if not word else f"it holds {word[:40]!r}, no process id"
        raise NotFound(f"the pid file {path} names no process: {what}", "say --tree PID, or start the job again")
    pid = int(word)
    process = procfs.process_id(pid)
    if process is None:
        raise NotFound(f"the pid file {path} names process {pid}, which does not exist", "start the job again")
    restored = gather.lineage_of(process).parent_image_id is not None
    if not restored and written < procfs.started_at(process) - SLACK_SECONDS:
        raise NotFound(
            f"the pid file {path} is older than process {procfs.words_for(pid)}: it was written for another process",
            f"if that is the job all the same, say --tree {pid}",
        )
    return pid


def _read(path: Path) -> tuple[str, float]:
    """What the file holds, and when it was written, in seconds since 1970. Raises NotFound."""
    try:
        with os.fdopen(open_plain(path), "rb") as file:
            return file.read(MOST_BYTES).decode("ascii", "replace"), os.fstat(file.fileno()).st_mtime
    except OSError as error:
        hint = "is the job running? Its start writes the file" if isinstance(error, FileNotFoundError) else LOOK
        raise NotFound(f"the pid file {path} cannot be read: {error.strerror}", hint) from None


def main_pid(unit: str) -> int:
    """The main process of a systemd unit, as systemctl says. Raises NotFound, MachineLacks."""
    program = commands.find_program("systemctl")
    if program is None:
        raise MachineLacks("--unit: there is no systemctl here", "say --tree PID or --pid-file FILE")
    answer = commands.run([str(program), "show", "-p", "MainPID", "--value", "--", unit], timeout=SYSTEMCTL_SECONDS)
    if not answer.ok:
        why = answer.stderr.strip().partition("\n")[0]
        raise MachineLacks(f"--unit {unit}: {answer.describe()}{f': {why}' if why else ''}", f"systemctl status {unit}")
    word = answer.stdout.strip()
    if not (word.isascii() and word.isdigit() and int(word) > 0):
        raise NotFound(f"the unit {unit} has no main process", f"systemctl status {unit}")
    return int(word)

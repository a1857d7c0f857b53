"""Changes of the host's settings for the time of a run: counted across runs, put back by the last.

Each changed setting has a record in /run/gpuckpt/settings: the value before, the value set, and the runs
that want it. A run counts as long as its directory is locked, so a run that was killed counts no more.

steps, and what a crash at each leaves:

1. record written      the setting is as before: whoever puts it back finds nothing to do
2. setting written     the run's other process puts it back, or a second owner, or the next run
3. put back            as before; the record says so until it goes
A value that somebody else has set meanwhile is left alone.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from gpuckpt.model.records import dataclass
from gpuckpt.owner import runs
from gpuckpt.system import hostsettings
from gpuckpt.system.hostsettings import HUGE_PAGES, PIPE_SIZE, SETTINGS, Setting

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

FOLDER = "settings"
PIPE_LIMIT_BYTES = 16 << 20
"""Above what a capture asks for (8 MiB for CRIU's pipes)."""

PATIENCE_SECONDS = 10.0
"""Others hold the lock for some reads and writes in memory; one that was stopped there must not hold us."""
STEP_SECONDS = 0.02


@dataclass(frozen=True, slots=True)
class Change:
    """A setting as runs have changed it."""

    before: str
    during: str
    runs: tuple[str, ...]
    """Names of their directories."""


def change(setting: Setting, value: str, run_directory: Path) -> list[str]:
    """Set it for this run, which must be locked; a note where that was not possible. Never raises.

    Nothing is done where the value serves already and no other run has set it.
    """
    try:
        with _alone():
            _enter(setting, value, run_directory.name)
    except (OSError, ValueError) as error:
        why = (error.strerror if isinstance(error, OSError) else None) or str(error)
        return [f"{setting.words} could not be set to {value} ({why}): the run went on without"]
    return []


def _enter(setting: Setting, value: str, run: str) -> None:
    record, now = _load(setting), hostsettings.read(setting)
    if record is not None and now == record.during and hostsettings.is_enough(now, value):
        _store(setting, replace(record, runs=(*filter(_lives, record.runs), run)))
        return
    if hostsettings.is_enough(now, value):
        return
    others = tuple(filter(_lives, record.runs)) if record is not None else ()
    _store(setting, Change(now, value, (*others, run)))
    try:
        hostsettings.write(setting, value)
    except OSError:
        _forget(setting) if record is None else _store(setting, record)
        raise


def put_back(run_directory: Path, settings: Sequence[Setting] = SETTINGS) -> list[str]:
    """This run wants no change any more: the last one puts the old value back. Notes; never raises.

    More than once is no harm, and any process may do it for a run that is over.
    """
    return _leave(settings, run_directory.name)


def put_back_dead() -> list[str]:
    """Put back what only runs that were killed still want. Notes; never raises."""
    return _leave(SETTINGS, None)


def _leave(settings: Sequence[Setting], run: str | None) -> list[str]:
    try:
        if not any(_path(setting).exists() for setting in settings):
            return []
        with _alone():
            return [note for setting in settings for note in _leave_one(setting, run)]
    except PermissionError:
        return []  # who is not root has changed nothing, and a check says so in better words
    except OSError as error:
        return [f"a host setting could not be put back now ({error.strerror}); the next run does"]


def _leave_one(setting: Setting, run: str | None) -> list[str]:
    record = _load(setting)
    if record is None:
        return []
    left = tuple(one for one in record.runs if one != run and _lives(one))
    if not left:
        return _put_back(setting, record, by_others=run not in record.runs)
    if left != record.runs:
        _store(setting, replace(record, runs=left))
    return []


def _put_back(setting: Setting, record: Change, *, by_others: bool) -> list[str]:
    try:
        now = hostsettings.read(setting)
        if now == record.during:
            hostsettings.write(setting, record.before)
    except OSError as error:
        hint = f"write {record.before} into {setting.path}"
        return [f"{setting.words} could not be put back to {record.before} ({error.strerror}): {hint}"]
    _forget(setting)
    if now not in (record.during, record.before):
        return [f"{setting.words}: somebody has set {now} meanwhile, and it stays (before the run: {record.before})"]
    if by_others and now == record.during:
        return [f"{setting.words} put back to {record.before}: a gpuckpt that was killed had left {now}"]
    return []


def left_by_dead() -> tuple[str, ...]:
    """Settings that runs that were killed have left changed, in words; for those who only look."""
    found = []
    for setting in SETTINGS:
        record = _load(setting)
        if record is None or any(map(_lives, record.runs)):
            continue
        with contextlib.suppress(OSError):
            if hostsettings.read(setting) == record.during:
                found.append(f"{setting.words} at {record.during}, before it {record.before}")
    return tuple(found)


def raise_pipe_limit(run_directory: Path) -> list[str]:
    """Let this run make large pipes, where only fs.pipe-max-size stands in the way. Notes; never raises."""
    if not hostsettings.pipes_are_limited():
        return []
    return change(PIPE_SIZE, str(PIPE_LIMIT_BYTES), run_directory)


class HugePages:
    """Transparent huge pages for the CUDA processes of one order, from `begin` to `end`."""

    def __init__(self, run_directory: Path, *, wanted: bool) -> None:
        self._run = run_directory
        self._wanted = wanted
        self.notes: list[str] = []
        """For the report."""

    def begin(self) -> None:
        """Set them to `always`, where that is wanted."""
        if self._wanted:
            self.notes += change(HUGE_PAGES, "always", self._run)

    def end(self) -> None:
        """Put them back; more than once is no harm."""
        if self._wanted:
            self.notes += put_back(self._run, (HUGE_PAGES,))


def _lives(run: str) -> bool:
    return runs.is_locked(runs.RUNTIME / "runs" / run / "lock")


def _path(setting: Setting) -> Path:
    return runs.RUNTIME / FOLDER / f"{setting.name}.json"


def _load(setting: Setting) -> Change | None:
    """The record; None where there is none, or none that can be read."""
    try:
        said = json.loads(_path(setting).read_text())
        return Change(str(said["before"]), str(said["during"]), tuple(map(str, said["runs"])))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _store(setting: Setting, record: Change) -> None:
    """Replace the record at once: a crash leaves the old one or the new one."""
    path = _path(setting)
    fresh = path.with_suffix(".new")
    fresh.write_text(json.dumps(asdict(record)))
    fresh.rename(path)


def _forget(setting: Setting) -> None:
    _path(setting).unlink(missing_ok=True)


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """One process at a time reads and writes records. Raises OSError, TimeoutError included."""
    runs.make_runtime(FOLDER)
    descriptor = os.open(runs.RUNTIME / FOLDER / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        _lock(descriptor)
        yield
    finally:
        os.close(descriptor)


def _lock(descriptor: int) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise TimeoutError(errno.ETIMEDOUT, "another gpuckpt holds the records of host settings") from None
            time.sleep(STEP_SECONDS)
        else:
            return

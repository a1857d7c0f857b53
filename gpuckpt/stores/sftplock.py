"""A lock on a host that has none: a file that names its holder and is touched every few seconds.

One that was not touched for STALE_SECONDS, or whose holder is seen to be dead, is nobody's.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import time
from typing import Any, ClassVar

from gpuckpt.model.errors import Busy
from gpuckpt.model.facts import ProcessId
from gpuckpt.system import procfs
from gpuckpt.system.sftp import Sftp

STALE_SECONDS = 120
BEAT_SECONDS = 10.0
LOCK = b"lock"
MOST_LOCK = 4096


class SftpLock:
    """NAME.partial/lock: one push at a time."""

    _held: ClassVar[set[str]] = set()
    """The locks of this process. One that names it and is not among them is left from a connection it lost."""

    def __init__(self, session: Sftp, partial: bytes, where: str) -> None:
        """`where`: what is locked, in words."""
        self._session, self._partial, self._where = session, partial, where
        self._place = partial + b"/" + LOCK
        self._id = secrets.token_hex(8)

    def take(self) -> None:
        """Make it ours, and have the session touch it while it is used. Raises Busy, LinkLost."""
        for _ in range(2):
            try:
                self._session.write_small(self._place, _holder(self._id), new=True)
            except OSError:
                self._remove_stale()
            else:
                self._held.add(self._id)
                self._session.beat = _Beat(self._session, self._place, self._id)
                return
        raise Busy(f"another gpuckpt is sending to {self._where} right now", "wait for it to end")

    def release(self) -> None:
        """Remove it, where it is ours. Raises LinkLost, OSError."""
        self._session.beat = _no_beat
        if self._id in self._held:
            self._held.discard(self._id)
            self._session.remove_file(self._place)

    def _remove_stale(self) -> None:
        """Remove a lock that is nobody's. Raises Busy."""
        seen = self._session.look(self._place)
        if seen is None:
            return
        holder: dict[str, Any] = {}
        with contextlib.suppress(OSError, ValueError):
            holder = dict(json.loads(self._session.read_small(self._place, MOST_LOCK)))
        if not (_is_dead(holder, self._held) or self._now() - seen.modified > STALE_SECONDS):
            who = f"gpuckpt {holder.get('pid')} on {holder.get('host')}" if holder else "another gpuckpt"
            raise Busy(
                f"{who} is sending to {self._where} right now",
                f"wait for it to end; if it is dead its lock is free {STALE_SECONDS} s after its last sign of life",
            )
        self._session.remove_file(self._place)

    def _now(self) -> int:
        """The clock of the other side, in seconds: that of the file system which dates the lock."""
        probe = self._partial + b"/now." + secrets.token_hex(4).encode()
        self._session.write_small(probe, b"")
        seen = self._session.look(probe)
        self._session.remove_file(probe)
        return seen.modified if seen is not None else 0


def _no_beat() -> None:
    """Nothing is locked."""


class _Beat:
    """Touches the lock, not too often."""

    def __init__(self, session: Sftp, place: bytes, identity: str) -> None:
        self._session, self._place, self._id = session, place, identity
        self._at = time.monotonic()

    def __call__(self) -> None:
        if time.monotonic() - self._at > BEAT_SECONDS:
            self._at = time.monotonic()
            with contextlib.suppress(OSError):
                self._session.write_small(self._place, _holder(self._id))


def _holder(identity: str) -> bytes:
    own = procfs.process_id(os.getpid())
    start = own.start_ticks if own is not None else 0
    return json.dumps(
        {"host": os.uname().nodename, "pid": os.getpid(), "start": start, "time": time.time(), "id": identity}
    ).encode()


def _is_dead(holder: dict[str, Any], held: set[str]) -> bool:
    """The holder was a process of this host that is not there any more, or this very one on a connection it lost."""
    pid, start = holder.get("pid"), holder.get("start")
    if holder.get("host") != os.uname().nodename or type(pid) is not int or type(start) is not int:
        return False
    if pid == os.getpid():
        return holder.get("id") not in held
    return not procfs.is_same(ProcessId(pid, start))

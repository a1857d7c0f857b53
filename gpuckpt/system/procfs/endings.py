"""How a process ended that is nobody's child here: its wait status, for as long as the kernel can still tell.

A zombie has it in field 52 of /proc/PID/stat (proc_pid_stat(5)); of a process that has been reaped a pidfd
that was opened before tells it (PIDFD_GET_INFO with PIDFD_INFO_EXIT, Linux 6.15, include/uapi/linux/pidfd.h).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
from typing import TYPE_CHECKING

from gpuckpt.system.procfs.identity import is_same
from gpuckpt.system.procfs.reading import read_bytes

if TYPE_CHECKING:
    from gpuckpt.model.facts import ProcessId

_INFO = struct.Struct("=QQ11Ii")
"""struct pidfd_info, its first version: mask, cgroup, pid, tgid, ppid, eight ids, the wait status."""
_PIDFD_GET_INFO = 3 << 30 | _INFO.size << 16 | 0xFF << 8 | 11
_PIDFD_INFO_EXIT = 1 << 3
_EXIT_CODE_FIELD = 52
_ZOMBIE = b"Z"


class Watched:
    """A process that may end. Use as a context manager."""

    def __init__(self, process: ProcessId) -> None:
        self._process = process
        self._pidfd: int | None = None

    def __enter__(self) -> Watched:  # noqa: PYI034 - typing.Self comes with 3.11
        with contextlib.suppress(OSError):
            self._pidfd = os.pidfd_open(self._process.pid)
        return self

    def __exit__(self, *_: object) -> None:
        if self._pidfd is not None:
            os.close(self._pidfd)

    def wait_status(self) -> int | None:
        """As wait(2) would give it; None while it lives, or where nobody can tell any more."""
        if is_same(self._process):
            return _of_zombie(self._process.pid)
        return None if self._pidfd is None else _of_reaped(self._pidfd)


def end_of_child(pid: int) -> int:
    """A descriptor that can be read once a child, which nobody has waited for, has ended. Raises OSError."""
    return os.pidfd_open(pid)


def _of_zombie(pid: int) -> int | None:
    words = (read_bytes(f"/proc/{pid}/stat") or b"").rpartition(b")")[2].split()
    # The first word is field 3, the state.
    return int(words[_EXIT_CODE_FIELD - 3]) if words and words[0] == _ZOMBIE else None


def _of_reaped(pidfd: int) -> int | None:
    try:
        answer = fcntl.ioctl(pidfd, _PIDFD_GET_INFO, _INFO.pack(_PIDFD_INFO_EXIT, *(0,) * 13))
    except OSError:
        return None
    mask, *_, status = _INFO.unpack(answer)
    return status if mask & _PIDFD_INFO_EXIT else None

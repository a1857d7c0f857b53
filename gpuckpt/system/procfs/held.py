"""What is looked up in a process whose threads are held, so that one of them can carry out calls for us."""

from __future__ import annotations

import ctypes
import os

from gpuckpt.system.procfs.reading import maps_of, status_of

_SYS_PIDFD_GETFD = 438
"""The same on every architecture."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


def is_filtered(tid: int) -> bool:
    """Whether a thread's system calls go through a filter (seccomp); also where that cannot be told."""
    status = status_of(tid)
    return status is None or status.get("Seccomp", "0") != "0"


def vdso(pid: int) -> tuple[int, bytes]:
    """Where the kernel's own code lies in a process, and that code; (0, b"") where it has none that can be read."""
    found = next((one for one in maps_of(pid) if one.path == "[vdso]"), None)
    if found is None:
        return 0, b""
    try:
        with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:  # noqa: PTH123 - a path as text
            memory.seek(found.start)
            return found.start, memory.read(found.end - found.start)
    except OSError:
        return 0, b""


def duplicate(pid: int, descriptor: int) -> int:
    """Our own duplicate of what another process has open (pidfd_getfd(2)). Raises OSError."""
    process = os.pidfd_open(pid)
    try:
        found = int(_libc.syscall(_SYS_PIDFD_GETFD, process, descriptor, 0))
        if found < 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        return found
    finally:
        os.close(process)

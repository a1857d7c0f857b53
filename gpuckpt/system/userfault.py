"""Filling fresh memory of another process by userfaultfd(2): the one home of it.

UFFDIO_COPY gives a page that is not there its content as it comes into being. process_vm_writev(2) has the kernel
clear the page first, in a fault of its own: 0.65 s a GiB against 0.34 s (one core of an AMD EPYC, Linux 6.18). The
descriptor belongs to the memory of the process that has made it, so a held thread of that process makes it
(system/remotecalls.py) and closes it again, and who fills the memory works on a duplicate. With the last duplicate
the kernel forgets that the memory was registered.

Sources: userfaultfd(2), ioctl_userfaultfd(2), pidfd_getfd(2), linux/userfaultfd.h.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
from typing import TYPE_CHECKING

from gpuckpt.system import procfs
from gpuckpt.system.hold import HoldError
from gpuckpt.system.remotecalls import BorrowedThread, CannotCall

if TYPE_CHECKING:
    from gpuckpt.system.hold import Hold

_SYS_CLOSE, _SYS_USERFAULTFD = 3, 323
"""On x86-64, which is all that system/remotecalls.py knows."""
_USER_MODE_ONLY = 1
"""UFFD_USER_MODE_ONLY: allowed to everybody; UFFDIO_COPY needs no more."""


class _Api(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint64), ("features", ctypes.c_uint64), ("ioctls", ctypes.c_uint64))


class _Register(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_uint64) for name in ("start", "length", "mode", "ioctls"))


class _Copy(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_uint64) for name in ("target", "source", "length", "mode")),
        ("copied", ctypes.c_int64),
    )


_UFFDIO_API, _UFFDIO_REGISTER, _UFFDIO_COPY = 0xC018AA3F, 0xC020AA00, 0xC028AA03
_API_VERSION, _MISSING, _DONT_WAKE = 0xAA, 1, 1
_MOST_TRIES = 1000
"""Of a page for which the kernel says EAGAIN: its mappings change, which those of a held process do not."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.ioctl.argtypes = [ctypes.c_int, ctypes.c_ulong, ctypes.c_void_p]


def of_held(hold: Hold, pid: int, tid: int) -> int | None:
    """A descriptor of ours for the memory of a held process; None where there is none to be had. Raises HoldError."""
    with contextlib.ExitStack() as ours:
        try:
            with BorrowedThread(hold, pid, tid) as thread:
                theirs = thread.call(_SYS_USERFAULTFD, os.O_CLOEXEC | _USER_MODE_ONLY)
                try:
                    found = procfs.duplicate(pid, theirs)
                    ours.callback(os.close, found)
                finally:
                    _close_there(thread, theirs)
        except (CannotCall, OSError):
            return None
        ours.pop_all()
        return found


def _close_there(borrowed: BorrowedThread, descriptor: int) -> None:
    try:
        borrowed.call(_SYS_CLOSE, descriptor)
    except OSError as error:
        raise HoldError(f"descriptor {descriptor} could not be closed in it ({error.strerror})") from None


class Userfault:
    """Fills memory of one process. For any number of threads; the process must stand still."""

    def __init__(self, descriptor: int) -> None:
        """Takes the descriptor over. Raises OSError where the kernel speaks another version."""
        self._descriptor = descriptor
        code = self._ioctl(_UFFDIO_API, _Api(_API_VERSION))
        if code:
            self.close()
            raise OSError(code, f"userfaultfd: {os.strerror(code)}")

    def register(self, start: int, end: int) -> bool:
        """Let [start, end), whole pages of private anonymous memory, be filled; False where it cannot be."""
        return not self._ioctl(_UFFDIO_REGISTER, _Register(start, end - start, _MISSING))

    def copy(self, address: int, source: int, length: int) -> int:
        """Give pages that are not there their content, from our memory at `source`.

        Returns how many bytes came, from the front: fewer than `length` where the next page is there already. It
        can be written to (system/memory_io.py), which is not so for what is registered and not there. Raises
        ProcessLookupError when the process has ended, OSError (ENOMEM).
        """
        done = tries = 0
        while done < length:
            request = _Copy(address + done, source + done, length - done, _DONT_WAKE)
            code = self._ioctl(_UFFDIO_COPY, request)
            done += max(request.copied, 0)  # also where the rest failed: then the code is EAGAIN
            tries = 0 if request.copied > 0 else tries + 1
            if code == errno.EEXIST:
                break
            if code not in (0, errno.EAGAIN) or tries > _MOST_TRIES:
                raise OSError(code, f"userfaultfd: {os.strerror(code)}")
        return done

    def _ioctl(self, request: int, content: ctypes.Structure) -> int:
        """0, or why not; other threads go on meanwhile."""
        return ctypes.get_errno() if _libc.ioctl(self._descriptor, request, ctypes.addressof(content)) < 0 else 0

    def close(self) -> None:
        """Let the memory be as any other."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

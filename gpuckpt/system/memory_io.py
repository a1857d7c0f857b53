"""Writing into the memory of another process: the one home of process_vm_writev(2).

It needs no ptrace stop, only the right to one (CAP_SYS_PTRACE), respects the protection of mappings,
and lets any number of threads write at once: each call only takes the page table's own locks.

The kernel first makes the pages there present and writable and takes hold of them, up to a thousand at a time
(process_vm_rw_single_vec in mm/process_vm_access.c, the same since Linux 3.2), and then copies: so a write from
where nothing can be read makes pages come into being and changes nothing.
"""

from __future__ import annotations

import ctypes
import errno
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import mmap
    from collections.abc import Sequence

IOV_MAX = 1024
"""Entries of one call (UIO_MAXIOV)."""


class _Iovec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_uint64), ("length", ctypes.c_uint64))


_IovecArray = _Iovec * IOV_MAX

_libc = ctypes.CDLL(None, use_errno=True)
_libc.process_vm_writev.restype = ctypes.c_ssize_t
_libc.process_vm_writev.argtypes = [
    ctypes.c_int,
    ctypes.c_void_p,
    ctypes.c_ulong,
    ctypes.c_void_p,
    ctypes.c_ulong,
    ctypes.c_ulong,
]


class Writer:
    """Writes pieces of one buffer into processes. One for each thread; the buffer keeps its size and place."""

    def __init__(self, buffer: mmap.mmap | bytearray) -> None:
        self._anchor = (ctypes.c_char * len(buffer)).from_buffer(buffer)
        self._base = ctypes.addressof(self._anchor)
        self._size = len(buffer)
        self._local = _IovecArray()
        self._remote = _IovecArray()

    @property
    def address(self) -> int:
        """Where the buffer begins, in our memory."""
        return self._base

    def write(self, pid: int, pieces: Sequence[tuple[int, int, int]]) -> int:
        """Write each (address there, offset in the buffer, length); returns the bytes written, which are all.

        Raises ProcessLookupError when the process has ended, OSError (EFAULT: no writable memory there,
        EPERM: not allowed, ENOSYS: the kernel cannot).
        """
        self.require_inside(pieces)
        return sum(self._write(pid, pieces[first : first + IOV_MAX]) for first in range(0, len(pieces), IOV_MAX))

    def require_inside(self, pieces: Sequence[tuple[int, int, int]]) -> None:
        """Raises ValueError for pieces that are not all of the buffer's."""
        if any(offset < 0 or length < 0 or offset + length > self._size for _, offset, length in pieces):
            raise ValueError("a piece outside of the buffer")

    def _write(self, pid: int, pieces: Sequence[tuple[int, int, int]]) -> int:
        for number, (address, offset, length) in enumerate(pieces):
            self._local[number].base, self._local[number].length = self._base + offset, length
            self._remote[number].base, self._remote[number].length = address, length
        first, total = 0, 0
        while first < len(pieces):
            count, skip = len(pieces) - first, first * ctypes.sizeof(_Iovec)
            local, remote = ctypes.addressof(self._local) + skip, ctypes.addressof(self._remote) + skip
            done = _libc.process_vm_writev(pid, local, count, remote, count, 0)
            if done < 0:
                _raise(pid)
            total += done
            first = self._advance(first, done, len(pieces))
        return total

    def _advance(self, first: int, done: int, end: int) -> int:
        """Take what a call wrote off the lists; the index of the first piece that is not whole yet."""
        while first < end and done >= self._local[first].length:
            done -= self._local[first].length
            first += 1
        if first < end:
            self._local[first].base += done
            self._local[first].length -= done
            self._remote[first].base += done
            self._remote[first].length -= done
        return first


PREFAULT_BYTES = 4 << 20
"""What one call of `prefault` makes present: 1024 pages of 4 KiB."""


def prefault(pid: int, address: int, length: int) -> None:
    """Make up to PREFAULT_BYTES of memory there present, as a write of its own would; no byte of it changes.

    Raises ProcessLookupError when the process has ended, OSError (EPERM, ENOSYS). Where nothing is mapped, or nothing
    writable, nothing happens. The source is address 0, which is never mapped in a program that does not ask for it.
    """
    local, remote = _Iovec(0, length), _Iovec(address, length)
    done = _libc.process_vm_writev(pid, ctypes.addressof(local), 1, ctypes.addressof(remote), 1, 0)
    if done < 0 and ctypes.get_errno() != errno.EFAULT:
        _raise(pid)


def _raise(pid: int) -> None:
    code = ctypes.get_errno()
    raise OSError(code, f"process_vm_writev into process {pid}: {os.strerror(code)}")


def why_not(pid: int) -> str:
    """Why memory of this process cannot be written to, in words; '' where it can.

    Nothing is written: address 0 is never mapped, so EFAULT is the answer of a kernel that would.
    """
    nothing = ctypes.c_char(b"\0")
    local, remote = _Iovec(ctypes.addressof(nothing), 1), _Iovec(0, 1)
    done = _libc.process_vm_writev(pid, ctypes.addressof(local), 1, ctypes.addressof(remote), 1, 0)
    code = ctypes.get_errno() if done < 0 else 0
    if done >= 0 or code == errno.EFAULT:
        return ""
    return f"memory of another process cannot be written to here: {os.strerror(code)} (process_vm_writev)"

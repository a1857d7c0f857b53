"""System calls that a held thread carries out for us, after which it is as it was.

Its registers are set so that it stands at a `syscall` instruction (the vDSO has one), it is let go up to the
call and again up to its end (PTRACE_SYSCALL stops it at both), and then gets its registers back. None of its own
instructions runs, and none of its memory is touched. Its signals are blocked meanwhile: they wait as they did.

For a half-built tree: a thread that gets lost on the way has registers that are not its own, and must be ended; and
CRIU moves threads out of restartable sequences before it saves them, so that none is ended by the excursion.

Sources: ptrace(2), syscall(2); struct user_regs_struct is in asm/user_64.h, ptrace_sud_config in linux/ptrace.h.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import signal
import time
from typing import TYPE_CHECKING

from gpuckpt.system import procfs
from gpuckpt.system.hold import (
    PTRACE_EVENT_STOP,
    PTRACE_INTERRUPT,
    PTRACE_SETOPTIONS,
    WALL,
    HoldError,
    ptrace,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from gpuckpt.system.hold import Hold

_CONT, _GETREGS, _SETREGS, _SYSCALL = 7, 12, 13, 24
_GETSIGMASK, _SETSIGMASK, _GET_DISPATCH = 0x420A, 0x420B, 0x4211
_TRACESYSGOOD = 1
_SYSCALL_STOP = signal.SIGTRAP | 0x80
_SIGSET_BYTES = 8
_INSTRUCTION = b"\x0f\x05"
_USER_CODE_64 = 0x33
"""The code segment of a thread in 64-bit mode."""
_MOST_STOPS = 16
"""Of other kinds, on the way to a call's beginning or end."""
CALL_SECONDS = 10.0
"""None of the calls made here waits; but the thread needs a processor, as for the hold."""
_POLL_SECONDS = 0.00005

_REGISTERS = (
    *("r15", "r14", "r13", "r12", "rbp", "rbx", "r11", "r10", "r9", "r8", "rax", "rcx", "rdx", "rsi", "rdi"),
    *("orig_rax", "rip", "cs", "eflags", "rsp", "ss", "fs_base", "gs_base", "ds", "es", "fs", "gs"),
)
_ARGUMENTS = ("rdi", "rsi", "rdx", "r10", "r8", "r9")


class _Registers(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_uint64) for name in _REGISTERS)


class CannotCall(Exception):
    """This thread can carry out no calls for us; it was not touched."""


class BorrowedThread:
    """A held thread, for as long as the context lasts. From the OS thread that holds it only."""

    def __init__(self, hold: Hold, pid: int, tid: int) -> None:
        """Raises CannotCall: another processor, a thread that handles its calls itself, or no instruction to use."""
        self._hold, self._tid, self._is_lost = hold, tid, False
        self._own, self._own_mask = _Registers(), ctypes.c_uint64()
        if platform.machine() != "x86_64":
            raise CannotCall("registers of this processor are not known")
        if procfs.is_filtered(tid):
            raise CannotCall("the thread has a filter of system calls (seccomp)")
        if hold.keeps_signal(tid):
            raise CannotCall("a signal is on its way to the thread")
        self._instruction = _instruction_of(pid)

    def __enter__(self) -> BorrowedThread:  # noqa: PYI034 - typing.Self comes with 3.11
        try:
            ptrace(_GETREGS, self._tid, ctypes.addressof(self._own))
        except OSError as error:
            raise CannotCall(f"its registers cannot be read: {error.strerror}") from None
        if self._own.cs != _USER_CODE_64:
            raise CannotCall("it is a 32-bit thread")
        if self._dispatches():
            raise CannotCall("it has its calls given to itself (syscall user dispatch)")
        ptrace(_GETSIGMASK, self._tid, ctypes.addressof(self._own_mask), _SIGSET_BYTES)
        all_signals = ctypes.c_uint64(2**64 - 1)
        ptrace(_SETSIGMASK, self._tid, ctypes.addressof(all_signals), _SIGSET_BYTES)
        ptrace(PTRACE_SETOPTIONS, self._tid, self._hold.options | _TRACESYSGOOD)
        return self

    def __exit__(self, *_: object) -> None:
        """Raises HoldError when it cannot be made as it was."""
        if self._is_lost:
            return
        try:
            ptrace(_SETREGS, self._tid, ctypes.addressof(self._own))
            # On into the stop that it came from: only from there does the kernel repeat a call of its own
            # that the hold has interrupted.
            ptrace(PTRACE_INTERRUPT, self._tid)
            self._go_on(_CONT, _is_event_stop)
            ptrace(_SETSIGMASK, self._tid, ctypes.addressof(self._own_mask), _SIGSET_BYTES)
            ptrace(PTRACE_SETOPTIONS, self._tid, self._hold.options)
        except OSError as error:
            raise HoldError(f"thread {self._tid} has ended while it was held ({error.strerror})") from None

    def _dispatches(self) -> bool:
        """Whether its calls become signals of its own; a kernel that cannot say has no restored thread that does."""
        mode = (ctypes.c_uint64 * 4)()
        with contextlib.suppress(OSError):
            ptrace(_GET_DISPATCH, self._tid, ctypes.addressof(mode), ctypes.sizeof(mode))
        return mode[0] != 0

    def call(self, number: int, *arguments: int) -> int:
        """Carry out one call, which must not wait; its result.

        Raises OSError as the call failed, HoldError when the thread did not come to the call's end.
        """
        wanted = _Registers()
        ctypes.pointer(wanted)[0] = self._own
        wanted.rip, wanted.rax = self._instruction, number
        wanted.orig_rax = 2**64 - 1  # no call that a signal has interrupted, and that the kernel would repeat
        for name, value in zip(_ARGUMENTS, arguments, strict=False):
            setattr(wanted, name, value)
        try:
            ptrace(_SETREGS, self._tid, ctypes.addressof(wanted))
            self._go_on(_SYSCALL, _is_syscall_stop)  # to where it begins
            self._go_on(_SYSCALL, _is_syscall_stop)  # to its end
            ptrace(_GETREGS, self._tid, ctypes.addressof(wanted))
        except ProcessLookupError:
            raise HoldError(f"thread {self._tid} has ended while it was held") from None
        result = ctypes.c_int64(wanted.rax).value
        if result < 0:
            raise OSError(-result, os.strerror(-result))
        return result

    def _go_on(self, request: int, is_wanted: Callable[[int], bool]) -> None:
        """Let it run up to the wanted stop.

        A SIGSTOP, which cannot be blocked, has its effect on the process: we go on out of the stop that it makes.
        """
        deadline = time.monotonic() + CALL_SECONDS
        signal_to_give = 0
        for _ in range(_MOST_STOPS):
            ptrace(request, self._tid, signal_to_give)
            status = self._stopped(deadline)
            if is_wanted(status):
                return
            is_signal = not _is_event_stop(status) and not _is_syscall_stop(status)
            signal_to_give = os.WSTOPSIG(status) if is_signal else 0
            if signal_to_give not in (0, signal.SIGSTOP):
                raise HoldError(f"thread {self._tid} got signal {signal_to_give} while it was held")
        raise HoldError(f"thread {self._tid} was stopped again and again while it was held")

    def _stopped(self, deadline: float) -> int:
        while time.monotonic() < deadline:
            try:
                seen, status = os.waitpid(self._tid, WALL | os.WNOHANG)
            except ChildProcessError:
                raise ProcessLookupError from None
            if seen == self._tid:
                if not os.WIFSTOPPED(status):
                    raise ProcessLookupError
                return status
            time.sleep(_POLL_SECONDS)
        self._is_lost = True
        self._hold.lose(self._tid)
        raise HoldError(f"thread {self._tid} did not stop in time")


def _is_syscall_stop(status: int) -> bool:
    return os.WSTOPSIG(status) == _SYSCALL_STOP


def _is_event_stop(status: int) -> bool:
    return status >> 16 == PTRACE_EVENT_STOP


def _instruction_of(pid: int) -> int:
    """Where a `syscall` instruction lies that the process can run: in its vDSO."""
    start, code = procfs.vdso(pid)
    at = code.find(_INSTRUCTION)
    if at < 0:
        raise CannotCall("it has no vDSO with a system call in it")
    return start + at

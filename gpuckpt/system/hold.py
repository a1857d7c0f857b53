"""Holding threads in a ptrace stop: the one home of ptrace, with system/remotecalls.py.

Why ptrace: between the CUDA checkpoint and the dump, and between the restore and the CUDA restore, no
thread of the application may run an instruction, while the driver's restore thread must run. A
SIGSTOP would stop both. So every other thread is seized and interrupted; before letting go a SIGSTOP
is queued, which the kernel delivers before any user instruction, so CRIU takes over a tree that has
not moved.

All calls must come from one OS thread: a tracee belongs to the thread that seized it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

PTRACE_DETACH = 17
PTRACE_SETOPTIONS = 0x4200
PTRACE_SEIZE = 0x4206
PTRACE_INTERRUPT = 0x4207
PTRACE_O_EXITKILL = 1 << 20
PTRACE_EVENT_STOP = 128
WALL = 0x40000000

POLL_SECONDS = 0.0005


class HoldError(Exception):
    """A thread could not be held: it did not stop in time, or another tracer has it."""


_unreleased: set[int] = set()
"""Tracees of this process that have not stopped since they were interrupted (uninterruptible sleep).

A fact about the kernel, so it outlives the Hold that found it: whoever holds next has them already.
"""

RELEASE_SECONDS = 2.0


class Hold:
    """Threads held by this thread of this process.

    With `exitkill` the kernel ends every held thread's process when the holder dies: right for a
    half-built tree on restore, never for the user's job on dump.
    """

    def __init__(self, *, exitkill: bool) -> None:
        self._options = PTRACE_O_EXITKILL if exitkill else 0
        self._held: dict[int, int] = {}
        """tid -> signal to pass on when it is let go (0: none)."""
        self._seized: set[int] = set()
        """Seized and interrupted, not seen stopped yet."""

    @property
    def options(self) -> int:
        """The ptrace options of every held thread."""
        return self._options

    @property
    def tids(self) -> frozenset[int]:
        """The threads seen stopped."""
        return frozenset(self._held)

    def take_all(self, list_threads: Callable[[], Iterable[int]], deadline: float) -> None:
        """Hold every listed thread, listing again until no new one appears.

        A thread not yet held can start others, so the list is only final when a whole round adds
        nothing; it must leave out ended threads (zombies), which cannot be held and need not be. Raises
        HoldError after `deadline` (time.monotonic) or when a thread has another tracer.
        """
        refused: set[int] = set()
        while True:
            fresh = [tid for tid in list_threads() if tid not in self._held]
            if not fresh:
                return
            for tid in fresh:
                if not self._seize(tid):
                    self._note_refusal(tid, refused)
            for tid in fresh:
                self._await_stop(tid, deadline)

    @staticmethod
    def _note_refusal(tid: int, refused: set[int]) -> None:
        """The kernel refuses ended threads as it does traced ones; one that is still listed next time is traced."""
        if tid in refused:
            raise HoldError(f"thread {tid} is traced by another program")
        refused.add(tid)

    def _seize(self, tid: int) -> bool:
        """Seize and interrupt; False when the kernel refuses (ended meanwhile, or traced)."""
        try:
            if tid not in _unreleased:
                ptrace(PTRACE_SEIZE, tid, self._options)
            self._seized.add(tid)
            ptrace(PTRACE_INTERRUPT, tid)
        except ProcessLookupError:
            self._seized.discard(tid)
            _unreleased.discard(tid)
        except PermissionError:
            return False
        return True

    def _await_stop(self, tid: int, deadline: float) -> None:
        """Wait until the kernel reports the stop. A task in uninterruptible sleep must not hang us: bounded."""
        while tid in self._seized:
            try:
                seen, status = os.waitpid(tid, WALL | os.WNOHANG)
            except ChildProcessError:
                self._seized.discard(tid)
                return
            if seen == tid:
                self._seized.discard(tid)
                self._note_stop(tid, status)
                self._take_over(tid)
            elif time.monotonic() > deadline:
                raise HoldError(f"thread {tid} did not stop in time (uninterruptible sleep?)")
            else:
                time.sleep(POLL_SECONDS)

    def _take_over(self, tid: int) -> None:
        """A tracee that an earlier hold could not release has that hold's options."""
        if tid in _unreleased:
            _unreleased.discard(tid)
            with contextlib.suppress(ProcessLookupError):
                ptrace(PTRACE_SETOPTIONS, tid, self._options)

    def _note_stop(self, tid: int, status: int) -> None:
        if not os.WIFSTOPPED(status):
            return  # it ended meanwhile
        # A signal that was on its way arrives as a signal stop instead of the interrupt's own event;
        # it is kept and handed on when the thread is let go.
        event = status >> 16
        self._held[tid] = 0 if event == PTRACE_EVENT_STOP else os.WSTOPSIG(status)

    def keeps_signal(self, tid: int) -> bool:
        """Whether a signal waits to be passed on to a held thread; from another stop than this one it cannot be."""
        return bool(self._held.get(tid))

    def lose(self, tid: int) -> None:
        """A held thread was let run a little, and did not stop again when it should."""
        del self._held[tid]
        self._seized.add(tid)
        with contextlib.suppress(ProcessLookupError):
            ptrace(PTRACE_INTERRUPT, tid)

    def release(self, tids: Iterable[int]) -> None:
        """Let some threads go alone: they are stopped again at once where their process is stopped (state T)."""
        for tid in tids:
            if tid in self._held:
                with contextlib.suppress(ProcessLookupError):
                    ptrace(PTRACE_DETACH, tid, self._held[tid])
                del self._held[tid]

    def clear_exitkill(self) -> None:
        """From here on the tree survives the holder."""
        for tid in list(self._held):
            try:
                ptrace(PTRACE_SETOPTIONS, tid, 0)
            except ProcessLookupError:
                del self._held[tid]
        self._options = 0

    def let_go(self) -> None:
        """Detach from every thread; signals that were on their way are passed on. Never raises for ended threads."""
        self.release(list(self._held))
        deadline = time.monotonic() + RELEASE_SECONDS
        for tid in list(self._seized):
            self._let_go_late(tid, deadline)

    def _let_go_late(self, tid: int, deadline: float) -> None:
        """A thread that has not stopped can only be released when it does: wait a little, then keep it in mind."""
        self._seized.discard(tid)
        try:
            while (seen := os.waitpid(tid, WALL | os.WNOHANG))[0] != tid:
                if time.monotonic() > deadline:
                    _unreleased.add(tid)
                    return
                time.sleep(POLL_SECONDS)
            if os.WIFSTOPPED(seen[1]):
                event = seen[1] >> 16
                ptrace(PTRACE_DETACH, tid, 0 if event == PTRACE_EVENT_STOP else os.WSTOPSIG(seen[1]))
        except (ProcessLookupError, ChildProcessError):
            return


_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.restype = ctypes.c_long
_libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]


def ptrace(request: int, tid: int, data: int = 0, address: int = 0) -> None:
    """One ptrace call; raises ProcessLookupError (ended, or not stopped) or PermissionError."""
    if _libc.ptrace(request, tid, ctypes.c_void_p(address), ctypes.c_void_p(data)) < 0:
        code = ctypes.get_errno()
        if code == errno.EIO:  # the kernel's answer for a task that is already exiting
            code = errno.ESRCH
        raise OSError(code, os.strerror(code))

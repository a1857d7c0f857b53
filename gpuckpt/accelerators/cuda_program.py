"""NVIDIA's cuda-checkpoint program with --action, for drivers 555 to 569, whose libcuda has no such functions.

It does the same through the same driver, but one process start per call (about 26 ms, see
https://github.com/checkpoint-restore/criu/pull/3076), and tells errors only in words.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, cast

from gpuckpt.accelerators.protocol import (
    ILLEGAL_STATE,
    INVALID_CONTEXT,
    INVALID_VALUE,
    NO_CUDA_CODES,
    NO_DEVICE,
    NOT_INITIALIZED,
    NOT_PERMITTED,
    NOT_READY,
    NOT_SUPPORTED,
    OPERATING_SYSTEM,
    OUT_OF_MEMORY,
    SYSTEM_DRIVER_MISMATCH,
    TIMEOUT,
    UNKNOWN,
    DriverError,
)
from gpuckpt.system import commands

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gpuckpt.model.facts import CudaState

QUESTION_SECONDS = 60.0
"""Get-state took up to 7 s on big processes (https://github.com/NVIDIA/cuda-checkpoint/issues/29)."""
LOCK_MARGIN_SECONDS = 30.0
COPY_SECONDS = 3600.0
"""Ending the program in the middle of an operation leaves the driver's state out of step
(https://github.com/checkpoint-restore/criu/pull/2547), so the limit on a copy only stops a hang."""

_CODES_OF_TEXT = {
    "invalid argument": INVALID_VALUE,
    "out of memory": OUT_OF_MEMORY,
    "initialization error": NOT_INITIALIZED,
    "no CUDA-capable device is detected": NO_DEVICE,
    "invalid device context": INVALID_CONTEXT,
    "OS call failed or operation not supported on this OS": OPERATING_SYSTEM,
    "the operation cannot be performed in the present state": ILLEGAL_STATE,
    "device not ready": NOT_READY,
    "operation not permitted": NOT_PERMITTED,
    "operation not supported": NOT_SUPPORTED,
    "system has unsupported display driver / cuda driver combination": SYSTEM_DRIVER_MISMATCH,
}
"""cuGetErrorString's texts: the program prints one of them in quotes."""

_STATES = frozenset({"running", "locked", "checkpointed", "failed", "checkpointing", "restoring"})


class CudaProgram:
    """A Suspender over cuda-checkpoint."""

    def __init__(self, path: str) -> None:
        """`path`: the program, absolute."""
        self._path = path

    def restore_tid(self, pid: int) -> int | None:
        """See Suspender."""
        try:
            answer = self._run(pid, "restore-tid", ["--get-restore-tid"], QUESTION_SECONDS)
        except DriverError as error:
            if error.code in NO_CUDA_CODES:
                return None
            raise
        if not answer.isdecimal():
            raise DriverError(pid, "restore-tid", UNKNOWN, detail=f"unexpected answer {answer!r}")
        return int(answer)

    def state(self, pid: int) -> CudaState:
        """See Suspender."""
        answer = self._run(pid, "state", ["--get-state"], QUESTION_SECONDS).lower()
        return cast("CudaState", answer) if answer in _STATES else "unknown"

    def lock(self, pid: int, timeout_ms: int) -> None:
        """See Suspender. CRIU's plugin gives every driver from 555 on a --timeout in milliseconds too."""
        limit = timeout_ms / 1000
        bound = limit + LOCK_MARGIN_SECONDS if timeout_ms else COPY_SECONDS
        self._run(pid, "lock", ["--action", "lock", "--timeout", str(timeout_ms)], bound, limit_seconds=limit)

    def checkpoint(self, pid: int) -> None:
        """See Suspender."""
        self._run(pid, "checkpoint", ["--action", "checkpoint"], COPY_SECONDS)

    def restore(self, pid: int, gpu_map: Mapping[str, str]) -> None:
        """See Suspender."""
        pairs = ",".join(f"{old}={new}" for old, new in gpu_map.items())
        self._run(pid, "restore", ["--action", "restore", *(["--device-map", pairs] if pairs else [])], COPY_SECONDS)

    def unlock(self, pid: int) -> None:
        """See Suspender."""
        self._run(pid, "unlock", ["--action", "unlock"], QUESTION_SECONDS)

    def prepare(self) -> None:
        """Nothing: the program initialises CUDA by itself at each start."""

    def _run(self, pid: int, action: str, options: list[str], bound: float, *, limit_seconds: float = 0.0) -> str:
        """The program's answer; DriverError from its words when it fails or does not end within `bound` seconds."""
        try:
            completed = commands.run([self._path, *options, "--pid", str(pid)], timeout=bound)
        except OSError as error:
            raise DriverError(pid, action, OPERATING_SYSTEM, detail=f"{self._path}: {error.strerror}") from error
        if completed.timed_out:
            detail = f"{self._path} was ended after {bound:g} s"
            raise DriverError(pid, action, TIMEOUT, detail=detail, limit_seconds=limit_seconds)
        if not completed.ok:
            words = (completed.stderr.strip() or completed.stdout.strip() or completed.describe()).replace("\n", " ")
            raise DriverError(pid, action, code_of(words), detail=words, limit_seconds=limit_seconds)
        return completed.stdout.strip()


def code_of(words: str) -> int:
    """The CUresult behind the program's message: its last quoted text; UNKNOWN for any other."""
    quoted = re.findall(r'"([^"]*)"', words)
    return _CODES_OF_TEXT.get(quoted[-1], UNKNOWN) if quoted else UNKNOWN

"""The CUDA driver's checkpoint functions (libcuda.so.1, driver 570 and newer), called through ctypes.

The functions are a stable C interface: every argument struct is 64 bytes in every release from CUDA 12.8
to 13.5 and must be zeroed, so one layout serves all of them (cuda.h of those releases).
"""

from __future__ import annotations

import ctypes
import threading
from typing import TYPE_CHECKING, Any

from gpuckpt.accelerators.protocol import INVALID_VALUE, NO_CUDA_CODES, NOT_SUPPORTED, SUCCESS, DriverError
from gpuckpt.model.errors import MachineLacks

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from gpuckpt.model.facts import CudaState

LIBRARY = "libcuda.so.1"
FIRST_WITH_GPU_MAP = 13000
"""cuDriverGetVersion of driver 580: the first whose restore reads gpuPairs."""

_STATES: dict[int, CudaState] = {
    0: "running",
    1: "locked",
    2: "checkpointed",
    3: "failed",
    4: "checkpointing",
    5: "restoring",
}

_FUNCTIONS = (
    "cuCheckpointProcessGetRestoreThreadId",
    "cuCheckpointProcessGetState",
    "cuCheckpointProcessLock",
    "cuCheckpointProcessCheckpoint",
    "cuCheckpointProcessRestore",
    "cuCheckpointProcessUnlock",
)


class CudaUuid(ctypes.Structure):
    """CUuuid: the 16 bytes of a GPU's UUID in the order they are written."""

    _fields_ = (("bytes", ctypes.c_ubyte * 16),)


class GpuPair(ctypes.Structure):
    """CUcheckpointGpuPair."""

    _fields_ = (("old", CudaUuid), ("new", CudaUuid))


class LockArgs(ctypes.Structure):
    """CUcheckpointLockArgs; `timeout_ms` 0 means no limit."""

    _fields_ = (
        ("timeout_ms", ctypes.c_uint32),
        ("reserved0", ctypes.c_uint32),
        ("reserved1", ctypes.c_uint64 * 7),
    )


class CheckpointArgs(ctypes.Structure):
    """CUcheckpointCheckpointArgs. From 13.4 on the first word is customStorageInfo_out; zero means host memory."""

    _fields_ = (("custom_storage", ctypes.c_void_p), ("reserved", ctypes.c_uint64 * 7))


class RestoreArgs(ctypes.Structure):
    """CUcheckpointRestoreArgs: all reserved before 13.0, `custom_storage` reserved before 13.4; zero means none."""

    _fields_ = (
        ("gpu_pairs", ctypes.POINTER(GpuPair)),
        ("gpu_pairs_count", ctypes.c_uint32),
        ("padding", ctypes.c_uint32),
        ("custom_storage", ctypes.c_void_p),
        ("reserved", ctypes.c_uint64 * 5),
    )


class UnlockArgs(ctypes.Structure):
    """CUcheckpointUnlockArgs."""

    _fields_ = (("reserved", ctypes.c_uint64 * 8),)


def cuda_uuid(text: str) -> CudaUuid:
    """CUuuid from NVML's 'GPU-xxxxxxxx-xxxx-…'; ValueError for anything else ('MIG-…' too)."""
    if not text.startswith("GPU-"):
        raise ValueError(f"{text!r} is not the UUID of a whole GPU")
    import uuid  # noqa: PLC0415  it loads much, and only --gpu asks for it

    return CudaUuid((ctypes.c_ubyte * 16)(*uuid.UUID(text[4:]).bytes))


def restore_args(gpu_map: Mapping[str, str]) -> RestoreArgs:
    """The argument of a restore; the struct keeps its array of pairs alive."""
    args = RestoreArgs()
    if gpu_map:
        pairs = (GpuPair * len(gpu_map))(*(GpuPair(cuda_uuid(old), cuda_uuid(new)) for old, new in gpu_map.items()))
        args.gpu_pairs = ctypes.cast(pairs, ctypes.POINTER(GpuPair))
        args.gpu_pairs_count = len(gpu_map)
    return args


def load(library: str | None = None) -> ctypes.CDLL:
    """Load libcuda; OSError when there is none. A CDLL releases the GIL for the length of each call."""
    return ctypes.CDLL(library or LIBRARY)


def has_checkpoint_functions(library: ctypes.CDLL) -> bool:
    """Whether this libcuda is of driver 570 or newer."""
    return all(hasattr(library, name) for name in _FUNCTIONS)


def driver_version(library: ctypes.CDLL) -> int | None:
    """cuDriverGetVersion: 13000 for CUDA 13.0; needs no cuInit."""
    version = ctypes.c_int(0)
    if library.cuDriverGetVersion(ctypes.byref(version)) != SUCCESS:
        return None
    return version.value


class CudaApi:
    """A Suspender over libcuda's functions, which act on other processes through their restore thread."""

    def __init__(self, library: ctypes.CDLL, *, initialise: bool, gpus: Sequence[str] = ()) -> None:
        """`initialise`: call cuInit before the first restore (persistence mode off or unknown).

        `gpus`: the UUIDs of all GPUs of this host.
        """
        if not has_checkpoint_functions(library):
            raise MachineLacks(
                "the NVIDIA driver is too old: its libcuda has no checkpoint functions",
                "install driver 570 or newer, or a driver from 555 on and the cuda-checkpoint program",
            )
        self._library = library
        self._gpus = tuple(gpus)
        self._version = driver_version(library) or 0
        self._initialise = initialise
        self._initialise_lock = threading.Lock()

    def restore_tid(self, pid: int) -> int | None:
        """See Suspender: the restore tid tells CUDA processes from others; get-state also answers for wrappers."""
        tid = ctypes.c_int(-1)
        code = self._library.cuCheckpointProcessGetRestoreThreadId(pid, ctypes.byref(tid))
        if code in NO_CUDA_CODES:
            return None
        _raise_unless_success(pid, "restore-tid", code)
        return tid.value

    def state(self, pid: int) -> CudaState:
        """See Suspender; 'unknown' for a number that no release so far has."""
        state = ctypes.c_int(-1)
        code = self._library.cuCheckpointProcessGetState(pid, ctypes.byref(state))
        _raise_unless_success(pid, "state", code)
        return _STATES.get(state.value, "unknown")

    def lock(self, pid: int, timeout_ms: int) -> None:
        """See Suspender."""
        code = self._call("Lock", pid, LockArgs(timeout_ms=timeout_ms))
        _raise_unless_success(pid, "lock", code, limit_seconds=timeout_ms / 1000)

    def checkpoint(self, pid: int) -> None:
        """See Suspender."""
        _raise_unless_success(pid, "checkpoint", self._call("Checkpoint", pid, CheckpointArgs()))

    def restore(self, pid: int, gpu_map: Mapping[str, str]) -> None:
        """See Suspender. Drivers before 580 ignore a map, so it is refused here for them."""
        if gpu_map and self._version < FIRST_WITH_GPU_MAP:
            detail = "a restore onto other GPUs needs driver 580 or newer"
            raise DriverError(pid, "restore", NOT_SUPPORTED, detail=detail)
        try:
            args = restore_args(gpu_map) if gpu_map else None
        except ValueError as error:
            raise DriverError(pid, "restore", INVALID_VALUE, detail=str(error)) from error
        self.prepare()
        code = self._call("Restore", pid, args)
        if code == INVALID_VALUE and args is None:
            code = self._restore_by_full_map(pid)
        _raise_unless_success(pid, "restore", code)

    def _restore_by_full_map(self, pid: int) -> int:
        """Once more, every GPU onto itself; the driver's code.

        Without a map the driver refused a process with memory on two GPUs (580.159.04, H200s). A refused map changes
        nothing: the process can be tried again.
        """
        whole = all(uuid.startswith("GPU-") for uuid in self._gpus)
        if len(self._gpus) < 2 or not whole or self._version < FIRST_WITH_GPU_MAP:
            return INVALID_VALUE
        return self._call("Restore", pid, restore_args({uuid: uuid for uuid in self._gpus}))

    def unlock(self, pid: int) -> None:
        """See Suspender."""
        _raise_unless_success(pid, "unlock", self._call("Unlock", pid, UnlockArgs()))

    def prepare(self) -> None:
        """See Suspender: a restore needs persistence mode or a caller that has called cuInit (cuda.h).

        A failed cuInit is no failure here: the restore itself then says what is wrong.
        """
        with self._initialise_lock:
            if self._initialise and self._library.cuInit(0) == SUCCESS:
                self._initialise = False

    def _call(self, function: str, pid: int, args: ctypes.Structure | None) -> int:
        call: Any = getattr(self._library, f"cuCheckpointProcess{function}")
        return int(call(pid, ctypes.byref(args) if args is not None else None))


def _raise_unless_success(pid: int, action: str, code: int, *, limit_seconds: float = 0.0) -> None:
    if code != SUCCESS:
        raise DriverError(pid, action, code, limit_seconds=limit_seconds)

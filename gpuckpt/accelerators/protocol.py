"""What an accelerator must be able to do, and how it says that it could not.

An `Accelerator` gathers facts and never touches the job. A `Suspender` acts on the job; only the owner
process holds one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from gpuckpt.model.facts import CudaState, GpuDriver, GpuUse
from gpuckpt.model.records import dataclass

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

SUCCESS = 0
INVALID_VALUE = 1
OUT_OF_MEMORY = 2
NOT_INITIALIZED = 3
NO_DEVICE = 100
INVALID_CONTEXT = 201
OPERATING_SYSTEM = 304
ILLEGAL_STATE = 401
NOT_READY = 600
NOT_PERMITTED = 800
NOT_SUPPORTED = 801
SYSTEM_DRIVER_MISMATCH = 803
TIMEOUT = 909
UNKNOWN = 999

ERROR_NAMES = {
    INVALID_VALUE: "INVALID_VALUE",
    OUT_OF_MEMORY: "OUT_OF_MEMORY",
    NOT_INITIALIZED: "NOT_INITIALIZED",
    NO_DEVICE: "NO_DEVICE",
    INVALID_CONTEXT: "INVALID_CONTEXT",
    OPERATING_SYSTEM: "OPERATING_SYSTEM",
    ILLEGAL_STATE: "ILLEGAL_STATE",
    NOT_READY: "NOT_READY",
    NOT_PERMITTED: "NOT_PERMITTED",
    NOT_SUPPORTED: "NOT_SUPPORTED",
    SYSTEM_DRIVER_MISMATCH: "SYSTEM_DRIVER_MISMATCH",
    TIMEOUT: "TIMEOUT",
    UNKNOWN: "UNKNOWN",
}
"""CUresult values of cuda.h that the checkpoint functions are documented to return, or were seen to return."""

NO_CUDA_CODES = frozenset({NOT_INITIALIZED, INVALID_VALUE})
"""Get-restore-tid's answers for a process without CUDA; CRIU's plugin takes exactly these two as 'none'
(https://github.com/checkpoint-restore/criu/pull/3076). Anything else is an error, never 'none'."""

_CAUSES = {
    ("lock", INVALID_VALUE): "the process has no CUDA context, or it ended",
    ("lock", OPERATING_SYSTEM): (
        "the driver could not reach the process: it ended (a lock can kill its target), its other end of the "
        "driver's channel is gone, or CAP_SYS_PTRACE is missing"
    ),
    ("checkpoint", OUT_OF_MEMORY): (
        "no host memory for the copy of the GPU's memory, or the GPU is in MIG mode, which the driver reports this way"
    ),
    ("restore", OUT_OF_MEMORY): (
        "the GPU has too little free memory; the driver does not undo a restore that ran out half-way, so the "
        "process can only be killed and restored from its image"
    ),
    ("restore", OPERATING_SYSTEM): (
        "the driver could not reach the process, or an earlier restore ran out of GPU memory and its state is lost"
    ),
    ("restore", INVALID_VALUE): (
        "the driver does not accept the GPUs: a map must name every GPU the process could see, each of the same model; "
        "without one it may be a process with memory on several GPUs"
    ),
    ("restore", NOT_INITIALIZED): (
        "the driver is not initialised for a restore: persistence mode is off and CUDA could not be started here"
    ),
    ("unlock", ILLEGAL_STATE): (
        "the process is not locked: its GPU memory is not back, or an earlier restore failed and its state is lost"
    ),
}

_CAUSES_OF_CODE = {
    INVALID_VALUE: "the driver does not know this process as one with a CUDA context",
    OUT_OF_MEMORY: "out of memory",
    NOT_INITIALIZED: "the process has no CUDA context",
    NO_DEVICE: "the driver sees no GPU here: it is lost, or a device cgroup or CUDA_VISIBLE_DEVICES hides it",
    INVALID_CONTEXT: "the driver's context for this process is not valid",
    OPERATING_SYSTEM: "the driver could not reach the process: it ended, or CAP_SYS_PTRACE is missing",
    ILLEGAL_STATE: "the process is not in the CUDA state that this step needs",
    NOT_READY: "the GPU's work was not finished",
    NOT_PERMITTED: "the driver does not permit it: run as root, with persistence mode on",
    NOT_SUPPORTED: (
        "this driver cannot do it for what the process uses (CUDA IPC, NCCL's shared memory, managed memory, MPS, MIG)"
    ),
    SYSTEM_DRIVER_MISMATCH: "the driver's libraries and its kernel module differ: reboot or reload the module",
    TIMEOUT: "the driver did not answer in time",
    UNKNOWN: "the driver gives no cause",
}


class DriverError(Exception):
    """A driver call failed for one process. `code` is the CUresult, `name` its name without CUDA_ERROR_.

    `action` is what was asked: 'restore-tid', 'state', 'lock', 'checkpoint', 'restore' or 'unlock'.
    It says nothing about what became of the process: look.
    """

    def __init__(self, pid: int, action: str, code: int, *, detail: str = "", limit_seconds: float = 0.0) -> None:
        super().__init__(pid, action, code)
        self.pid = pid
        self.action = action
        self.code = code
        self.detail = detail
        """The program's own words, or a cause that the code alone does not tell."""
        self.limit_seconds = limit_seconds
        """The limit the call ran under; 0 where it had none."""

    @property
    def name(self) -> str:
        """'OUT_OF_MEMORY'; 'error 719' for a code without a name here."""
        return ERROR_NAMES.get(self.code, f"error {self.code}")

    @property
    def final(self) -> bool:
        """No later call can help the process: a restore ran out of GPU memory.

        https://github.com/NVIDIA/cuda-checkpoint/issues/44: later restores give 304, unlock 401.
        """
        return self.action == "restore" and self.code == OUT_OF_MEMORY

    def explain(self) -> str:
        """One sentence: what failed, for which process, and why."""
        return f"CUDA {self.action} of process {self.pid} failed: {self._cause()} ({self.name}, {self.code})"

    def _cause(self) -> str:
        if self.action == "lock" and self.code == NOT_READY:
            return f"the job's own GPU work did not finish within {self.limit_seconds:g} s"
        cause = _CAUSES.get((self.action, self.code)) or _CAUSES_OF_CODE.get(self.code, "the driver refused")
        return f"{cause}; {self.detail}" if self.detail else cause

    def __str__(self) -> str:
        return self.explain()


class Suspender(Protocol):
    """Suspends and resumes the GPU side of single processes. Only the owner process uses it.

    Thread-safe; a call blocks until the driver answers and releases the GIL meanwhile. Every method
    raises DriverError. `pid` must be a process, not a thread: the driver takes a thread id and acts on
    its whole process (https://github.com/NVIDIA/cuda-checkpoint/issues/41).

    Every call but `restore_tid` is answered by the process's restore thread. While that thread is stopped
    (SIGSTOP, ptrace, freezer) the call blocks without end, a lock beyond its timeout too, and is done as
    soon as the thread runs again (seen with driver 580.159).

    states: running --lock--> locked --checkpoint--> checkpointed --restore--> locked --unlock--> running
    """

    def restore_tid(self, pid: int) -> int | None:
        """The driver's own thread in the process, which must be able to run; None where there is no CUDA context.

        A zombie has none either (seen with driver 580.159).
        """
        ...

    def state(self, pid: int) -> CudaState:
        """The CUDA state of the process, as the driver has it now."""
        ...

    def lock(self, pid: int, timeout_ms: int) -> None:
        """Stop new GPU work and wait for what runs; NOT_READY after `timeout_ms`, the process then runs on."""
        ...

    def checkpoint(self, pid: int) -> None:
        """Copy the GPU memory of a locked process into its host memory and let go of the GPUs."""
        ...

    def restore(self, pid: int, gpu_map: Mapping[str, str]) -> None:
        """Bring the GPU memory of a checkpointed process back; it is locked then.

        `gpu_map`: old UUID -> new UUID ('GPU-…') for every GPU the process could see, or empty.
        Look at the free GPU memory first: OUT_OF_MEMORY is final.
        """
        ...

    def unlock(self, pid: int) -> None:
        """Let a locked process use its GPUs again."""
        ...

    def prepare(self) -> None:
        """Make restores possible from this process where the driver needs it; cheap otherwise."""
        ...


@dataclass(frozen=True, slots=True)
class Look:
    """The GPUs and who is on them, at one moment."""

    driver: GpuDriver
    uses: tuple[GpuUse, ...] = ()
    """GPU memory by device of every process that the driver names."""


class Accelerator(Protocol):
    """One kind of GPU: its facts, and the way to suspend its processes."""

    name: str

    def present(self) -> bool:
        """Whether this host seems to have the driver; cheap, loads no library."""
        ...

    def driver(self) -> GpuDriver:
        """The facts about driver and GPUs. Never raises: what could not be read is a `problem`, in words."""
        ...

    def get_ready(self) -> None:
        """It will be looked at once soon: what takes time of that is done from now on."""
        ...

    def look(self) -> Look:
        """All that one question to the driver tells. Never raises: see `driver`."""
        ...

    def uses(self, pids: Sequence[int]) -> tuple[GpuUse, ...]:
        """GPU memory of these processes by device; a process without any is left out. Never raises."""
        ...

    def suspender(self, *, force_program: bool = False, driver: GpuDriver | None = None) -> Suspender:
        """What suspends processes here; `driver`: what it said just now, else it is asked.

        Raises MachineLacks with cause and remedy.
        """
        ...

    def questioner(self, *, force_program: bool = False) -> Suspender:
        """One for `restore_tid` and `state` alone, at once: nobody is asked about the GPUs. Raises MachineLacks."""
        ...

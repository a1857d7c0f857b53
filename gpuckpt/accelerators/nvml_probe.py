"""Reads NVML in a process of its own: a lost card can crash the library and must not take gpuckpt along.

Run as `python -m gpuckpt.accelerators.nvml_probe [INDEX …]` it prints JSON lines and leaves out the named
devices. Before it touches a device it says so: when it dies or hangs, its starter knows which one it was.
With `--when-told` it loads and initialises NVML, and reads no device before its stdin ends.

    {"driver": "580.95.05", "cuda": 13000, "count": 2}      or  {"problem": "…", "code": 18}
    {"reading": 0}
    {"gpu": {…}, "processes": [[pid, bytes or null], …], "mps_processes": [pid, …]}
"""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any, TypeVar

from gpuckpt.accelerators.orphans import end_with_parent

if __name__ == "__main__":
    end_with_parent(sys.argv)  # before anything that takes long

import pynvml  # noqa: TID251 - its home

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

WHEN_TOLD = "--when-told"
XID_HINT = "look for Xid 79 ('GPU has fallen off the bus') in the kernel log; a lost GPU needs a reset or a reboot"


def main(arguments: list[str]) -> int:
    """Print the facts; 0 unless NVML cannot be used at all."""
    try:
        pynvml.nvmlInit()
        count = pynvml.nvmlDeviceGetCount()
    except pynvml.NVMLError as error:
        say({"problem": str(error), "code": error.value})
        return 1
    if WHEN_TOLD in arguments:
        sys.stdin.read()
    say({"driver": optional(_driver_version), "cuda": optional(_cuda_version), "count": count})
    for index in range(count):
        if str(index) not in arguments:
            say({"reading": index})
            say(read_device(index))
    return 0


def say(message: dict[str, Any]) -> None:
    """One line at once: what was read before a crash is kept."""
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


def optional(query: Callable[[], T]) -> T | None:
    """A value that some drivers or devices cannot give: unknown, unless the GPU itself is gone."""
    try:
        return query()
    except pynvml.NVMLError as error:
        if error.value == pynvml.NVML_ERROR_GPU_IS_LOST:
            raise
        return None


def read_device(index: int) -> dict[str, Any]:
    """Everything about one GPU; a GPU that cannot be read is a problem in words, never an exception."""
    gpu: dict[str, Any] = {
        "index": index,
        "uuid": "",
        "name": "",
        "memory_total_bytes": None,
        "memory_free_bytes": None,
    }
    try:
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        gpu["uuid"] = _text(pynvml.nvmlDeviceGetUUID(handle))
        gpu["name"] = _text(pynvml.nvmlDeviceGetName(handle))
        gpu.update(_memory(handle))
        gpu.update(_details(handle))
        return {"gpu": gpu, **_processes(handle)}
    except pynvml.NVMLError as error:
        gpu["problem"] = f"NVML cannot read GPU {index}: {error}; {XID_HINT}"
        return {"gpu": gpu, "processes": [], "mps_processes": []}


def _memory(handle: Any) -> dict[str, int | None]:
    memory = optional(lambda: pynvml.nvmlDeviceGetMemoryInfo(handle))
    return {
        "memory_total_bytes": None if memory is None else int(memory.total),
        "memory_free_bytes": None if memory is None else int(memory.free),
    }


def _details(handle: Any) -> dict[str, Any]:
    pci = optional(lambda: pynvml.nvmlDeviceGetPciInfo(handle))
    persistence = optional(lambda: pynvml.nvmlDeviceGetPersistenceMode(handle))
    return {
        "pci_bus_id": "" if pci is None else _text(pci.busId),
        "minor": optional(lambda: pynvml.nvmlDeviceGetMinorNumber(handle)),
        "mig_enabled": _mig(handle),
        "persistence_mode": None if persistence is None else bool(persistence),
    }


def _mig(handle: Any) -> bool | None:
    """Whether MIG mode is on. Only a GPU that cannot do MIG at all answers NOT_SUPPORTED."""
    try:
        current, _pending = pynvml.nvmlDeviceGetMigMode(handle)
    except pynvml.NVMLError as error:
        if error.value == pynvml.NVML_ERROR_GPU_IS_LOST:
            raise
        return False if error.value == pynvml.NVML_ERROR_NOT_SUPPORTED else None
    return bool(current)


def _processes(handle: Any) -> dict[str, Any]:
    compute = optional(lambda: pynvml.nvmlDeviceGetComputeRunningProcesses(handle)) or []
    mps = optional(lambda: pynvml.nvmlDeviceGetMPSComputeRunningProcesses(handle)) or []
    return {
        "processes": [[process.pid, process.usedGpuMemory] for process in [*compute, *mps]],
        "mps_processes": [process.pid for process in mps],
    }


def _driver_version() -> str:
    return _text(pynvml.nvmlSystemGetDriverVersion())


def _cuda_version() -> int:
    return int(pynvml.nvmlSystemGetCudaDriverVersion())


def _text(value: str | bytes) -> str:
    """Older releases of the bindings return bytes."""
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Free GPU memory is looked at before every CUDA restore: running out there cannot be undone.

A restore that runs out of memory half-way leaves a process that no later call can bring back
(https://github.com/NVIDIA/cuda-checkpoint/issues/44). Others can take the memory while the job is
suspended, so this also holds for the resume after `--leave-running` and for every rollback.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from gpuckpt.model.facts import Gpu, GpuDriver
    from gpuckpt.owner.messages import CudaMember

POLL_SECONDS = 1.0


def needed(members: Sequence[CudaMember], gpu_map: Mapping[str, str] | None = None) -> dict[str, int]:
    """Bytes needed on each GPU (UUID) by these processes, after the map."""
    out: dict[str, int] = {}
    for member in members:
        for uuid, size in member.memory_bytes.items():
            target = (gpu_map or {}).get(uuid, uuid)
            out[target] = out.get(target, 0) + size
    return out


def shortage(needs: Mapping[str, int], driver: GpuDriver) -> str:
    """Which GPU has too little free memory, by how much and who holds it; empty when all have enough.

    A GPU whose free memory is unknown is no shortage: refusing a rollback would leave the job suspended.
    """
    by_uuid = {gpu.uuid: gpu for gpu in driver.gpus}
    lines = [
        _sentence(by_uuid[uuid], size)
        for uuid, size in needs.items()
        if uuid in by_uuid and (free := by_uuid[uuid].memory_free_bytes) is not None and free < size
    ]
    return "; ".join(lines)


def _sentence(gpu: Gpu, size: int) -> str:
    holders = ", ".join(str(pid) for pid in gpu.compute_pids) or "processes that the driver does not name"
    free = gpu.memory_free_bytes or 0
    return f"GPU {gpu.index} has {free / 2**30:.1f} GiB free, {size / 2**30:.1f} GiB are needed; held by {holders}"


def await_room(
    members: Sequence[CudaMember],
    driver: Callable[[], GpuDriver],
    deadline: float,
    gpu_map: Mapping[str, str] | None = None,
    given_up: Callable[[], bool] = lambda: False,
) -> str:
    """Wait until the GPUs have room for these processes; returns the shortage that was left at the deadline.

    Or before that, where `given_up` says that nobody waits for it any more.
    """
    needs = needed(members, gpu_map)
    if not needs:
        return ""
    while True:
        missing = shortage(needs, driver())
        if not missing or time.monotonic() > deadline or given_up():
            return missing
        time.sleep(POLL_SECONDS)

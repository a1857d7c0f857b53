"""Asking for CUDA states with a limit: about a process whose restore thread stands still there may be no answer."""

from __future__ import annotations

import contextlib
import threading
import time
from typing import TYPE_CHECKING

from gpuckpt.accelerators.protocol import DriverError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gpuckpt.accelerators.protocol import Suspender
    from gpuckpt.model.facts import CudaState


def states_of(pids: Sequence[int], suspender: Suspender, seconds: float) -> dict[int, CudaState]:
    """The CUDA states, asked all at once; 'unknown' where the driver refuses or does not answer in `seconds`.

    A question that was not answered stays with its thread: it ends with this process at the latest.
    """
    found: dict[int, CudaState] = dict.fromkeys(pids, "unknown")

    def ask(pid: int) -> None:
        with contextlib.suppress(DriverError):
            found[pid] = suspender.state(pid)

    threads = [threading.Thread(target=ask, args=(pid,), daemon=True) for pid in pids]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return dict(found)

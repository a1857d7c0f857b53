"""GPUs: their facts, and the driver calls that suspend and resume the processes on them.

Adding an accelerator is one module with an `Accelerator` and one entry in ACCELERATORS. Driver libraries
are loaded when they are needed, never by an import.
"""

from __future__ import annotations

from gpuckpt.accelerators.nvidia import Nvidia
from gpuckpt.accelerators.protocol import Accelerator, DriverError, Suspender

ACCELERATORS: tuple[Accelerator, ...] = (Nvidia(),)

__all__ = ["ACCELERATORS", "Accelerator", "DriverError", "Suspender"]

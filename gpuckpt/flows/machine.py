"""The machine a flow works on: the bundle of what it may look at, handed in, replaced in tests."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpuckpt.accelerators import ACCELERATORS
from gpuckpt.model.records import dataclass
from gpuckpt.system import criu

if TYPE_CHECKING:
    from collections.abc import Callable

    from gpuckpt.accelerators import Accelerator
    from gpuckpt.accelerators.protocol import Look
    from gpuckpt.model.facts import CriuProgram, GpuDriver
    from gpuckpt.model.report import Event


@dataclass(frozen=True, slots=True)
class Machine:
    """The effects a flow uses besides the owner's."""

    accelerators: tuple[Accelerator, ...]
    examine_criu: Callable[[], CriuProgram]
    listener: Callable[[Event], None]

    def accelerator(self) -> Accelerator | None:
        """The accelerator whose driver is on this host, if any."""
        return next((one for one in self.accelerators if one.present()), None)

    def gpu_driver(self) -> GpuDriver:
        """The GPU driver's facts, also where there is none."""
        return self.look().driver

    def look(self) -> Look:
        """The GPU driver's facts, also where there is none, and who uses the GPUs."""
        accelerator = self.accelerator() or self.accelerators[0]
        return accelerator.look()


def this_machine(listener: Callable[[Event], None]) -> Machine:
    """The real one."""
    return Machine(ACCELERATORS, criu.examine, listener)

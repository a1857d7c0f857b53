"""NVIDIA GPUs: what NVML and the driver say, and which interface suspends processes on them."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from gpuckpt.accelerators import cuda, nvml
from gpuckpt.accelerators.cuda_program import CudaProgram
from gpuckpt.accelerators.protocol import Look
from gpuckpt.model.errors import MachineLacks
from gpuckpt.model.facts import GpuDriver, GpuUse
from gpuckpt.system import commands

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gpuckpt.accelerators.protocol import Suspender

PROGRAM = "cuda-checkpoint"
PROGRAM_SOURCE = "https://github.com/NVIDIA/cuda-checkpoint"
FIRST_WITH_API = 570
FIRST_WITH_ACTIONS = 555
"""550's cuda-checkpoint has only --toggle: no lock of its own, so no safe way back."""

KERNEL_MODULE = Path("/proc/driver/nvidia/version")
DEVICE = Path("/dev/nvidiactl")

Interface = Literal["none", "api", "program"]


class Nvidia:
    """See Accelerator."""

    name = "nvidia"

    def __init__(self) -> None:
        self._prepared: list[nvml.Prepared] = []
        """At most one."""

    def present(self) -> bool:
        """See Accelerator: the kernel module is loaded, or LD_LIBRARY_PATH names a libcuda."""
        directories = filter(None, os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep))
        return (
            DEVICE.exists()
            or KERNEL_MODULE.exists()
            or any((Path(directory) / cuda.LIBRARY).exists() for directory in directories)
        )

    def driver(self) -> GpuDriver:
        """See Accelerator."""
        return self.look().driver

    def look(self) -> Look:
        """See Accelerator.

        NVML counts pids as the driver sees them; inside a pid namespace these can be the host's, and then
        the processes of a tree are not found here.
        """
        if not self.present():
            return Look(GpuDriver(problem="no NVIDIA driver is loaded on this host"))
        try:
            readings = self._prepared.pop().read()
        except IndexError:
            readings = nvml.read()
        return Look(self._facts(readings), tuple(readings.uses))

    def get_ready(self) -> None:
        """See Accelerator."""
        if self.present() and not self._prepared:
            with contextlib.suppress(OSError):  # it is asked in the plain way then
                self._prepared.append(nvml.Prepared())

    @staticmethod
    def _facts(readings: nvml.Readings) -> GpuDriver:
        version = readings.driver or kernel_module_version()
        program = commands.find_program(PROGRAM)
        interface, problem = choose_interface(version, program=program is not None)
        if readings.code == nvml.LIB_RM_VERSION_MISMATCH:
            interface, problem = "none", mismatch_problem(version)
        return GpuDriver(
            version=version,
            cuda_version=cuda_version_text(readings.cuda),
            interface=interface,
            program=str(program) if program else None,
            gpus=tuple(readings.gpus[index] for index in sorted(readings.gpus)),
            mps=readings.mps_clients or mps_daemon_runs(),
            problem=problem or readings.problem,
        )

    def uses(self, pids: Sequence[int]) -> tuple[GpuUse, ...]:
        """See Accelerator."""
        wanted = set(pids)
        return tuple(use for use in self.look().uses if use.pid in wanted)

    def questioner(self, *, force_program: bool = False) -> Suspender:
        """See Accelerator: the kernel module tells its version without NVML, which takes 0.2 s to start."""
        version = kernel_module_version(KERNEL_MODULE)
        if force_program or version is None:
            return self.suspender(force_program=force_program)
        program = commands.find_program(PROGRAM)
        interface, problem = choose_interface(version, program=program is not None)
        path = str(program) if program else None
        return self.suspender(driver=GpuDriver(version=version, interface=interface, program=path, problem=problem))

    def suspender(self, *, force_program: bool = False, driver: GpuDriver | None = None) -> Suspender:
        """See Accelerator."""
        facts = driver or self.driver()
        _refuse_unusable(facts)
        if force_program or facts.interface == "program":
            if facts.program is None:
                raise MachineLacks(f"the program {PROGRAM} is not on this host", f"get it from {PROGRAM_SOURCE}")
            return CudaProgram(facts.program)
        try:
            library = cuda.load()
        except OSError as error:
            raise MachineLacks(
                f"the driver's library cannot be loaded: {error}",
                "install the driver's user-space libraries (libcuda1, nvidia-driver-libs or the like)",
            ) from error
        # Unknown counts as off: one cuInit too many costs a second, one too few costs the restore.
        persistent = bool(facts.gpus) and all(gpu.persistence_mode for gpu in facts.gpus)
        return cuda.CudaApi(library, initialise=not persistent, gpus=[gpu.uuid for gpu in facts.gpus])


def _refuse_unusable(facts: GpuDriver) -> None:
    if facts.interface == "none":
        raise MachineLacks(
            f"GPU processes cannot be suspended here: {facts.problem}",
            "NVIDIA driver 570 or newer is needed; `gpuckpt inspect` shows what this host has",
        )
    if facts.gpus and all(gpu.mig_enabled for gpu in facts.gpus):
        raise MachineLacks(
            "MIG mode is on, and the driver's checkpoint feature does not support MIG",
            "move the job to a GPU without MIG (nvidia-smi -i N -mig 0 turns it off on an idle GPU)",
        )


def choose_interface(version: str | None, *, program: bool) -> tuple[Interface, str]:
    """The way to suspend processes with this driver, and what is wrong where there is none.

    555 brought cuda-checkpoint --action, 570 the functions in libcuda (the table in NVIDIA's README of
    cuda-checkpoint).
    """
    major = major_version(version)
    if major is None:
        return "none", "the driver's version cannot be read"
    if major >= FIRST_WITH_API:
        return "api", ""
    if major < FIRST_WITH_ACTIONS:
        return "none", f"driver {version} is too old for safe checkpoints: install 570 or newer"
    if not program:
        return "none", f"driver {version} needs the program {PROGRAM}: get it from {PROGRAM_SOURCE}, or install 570"
    return "program", ""


def major_version(version: str | None) -> int | None:
    """570 of '570.86.15'."""
    match = re.match(r"(\d+)\.", version or "")
    return int(match.group(1)) if match else None


def cuda_version_text(number: int | None) -> str | None:
    """'13.0' of 13000."""
    return None if number is None else f"{number // 1000}.{number % 1000 // 10}"


def kernel_module_version(path: Path = KERNEL_MODULE) -> str | None:
    """The version of the loaded kernel module, proprietary or open."""
    try:
        first_line = path.read_text(encoding="utf-8", errors="replace").partition("\n")[0]
    except OSError:
        return None
    match = re.search(r"\b\d{3,}\.\d+(?:\.\d+)*\b", first_line)
    return match.group(0) if match else None


def mismatch_problem(version: str | None) -> str:
    """https://github.com/wookayin/gpustat/issues/147: a package upgrade without a reload of the module."""
    loaded = f"the loaded kernel module is {version}" if version else "the loaded kernel module is another version"
    return f"driver and libraries differ: {loaded}; reboot, or unload and load the nvidia module"


def mps_daemon_runs() -> bool:
    """Whether MPS's control daemon runs: its pid file lies in its pipe directory (NVIDIA's MPS manual, section 5)."""
    directory = Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps"))  # noqa: S108 - MPS's own default
    try:
        pid = int((directory / "nvidia-cuda-mps-control.pid").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return False
    return Path(f"/proc/{pid}").exists()

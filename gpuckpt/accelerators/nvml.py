"""Asks NVML through child processes, so that a crash or a hang at one GPU costs only that GPU's facts."""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass, field
from typing import Any

from gpuckpt.accelerators.orphans import child_of_us
from gpuckpt.model.facts import Gpu, GpuUse
from gpuckpt.system import commands

PROBE_MODULE = "gpuckpt.accelerators.nvml_probe"
WHEN_TOLD = "--when-told"
PREPARED_SECONDS = 5.0
"""At least, of a probe that only has to read."""
DEVICE_SECONDS = 30.0
"""NVML's start takes seconds per GPU where persistence mode is off."""
ALL_SECONDS = 90.0

LIBRARY_NOT_FOUND = 12
LIB_RM_VERSION_MISMATCH = 18


@dataclass(slots=True)
class Readings:
    """What NVML said. `code` is its error when it could not be used at all."""

    driver: str | None = None
    cuda: int | None = None
    gpus: dict[int, Gpu] = field(default_factory=dict)
    uses: list[GpuUse] = field(default_factory=list)
    mps_clients: bool = False
    problem: str = ""
    code: int = 0
    reading: int | None = None
    """The device that the child had begun and not finished."""

    def take(self, line: str) -> None:
        """Add one line of the child; an unfinished last line is ignored."""
        try:
            message = json.loads(line)
        except ValueError:
            return
        if not isinstance(message, dict):
            return
        if "problem" in message:
            self.problem, self.code = message["problem"], message["code"]
        elif "driver" in message:
            self.driver, self.cuda = message["driver"], message["cuda"]
        elif "reading" in message:
            self.reading = message["reading"]
        elif "gpu" in message:
            self._take_gpu(message)

    def _take_gpu(self, message: dict[str, Any]) -> None:
        pids = tuple(sorted({pid for pid, _memory in message["processes"]}))
        gpu = Gpu(**message["gpu"], compute_pids=pids)
        self.gpus[gpu.index] = gpu
        self.uses += [GpuUse(pid, gpu.uuid, memory) for pid, memory in message["processes"]]
        self.mps_clients |= bool(message["mps_processes"])
        self.reading = None


class Prepared:
    """A probe that has loaded NVML and waits: read then, facts take 10 ms instead of the 0.2 s of a start.

    It ends by itself with the process that started it.
    """

    def __init__(self) -> None:
        """Raises OSError where it cannot be started."""
        self._began = time.monotonic()
        waits, self._tell = os.pipe()
        try:
            argv = commands.python_module(PROBE_MODULE, child_of_us(), WHEN_TOLD)
            self._child = commands.start(argv, capture=True, stdin=waits, cwd="/")
        except BaseException:
            os.close(self._tell)
            raise
        finally:
            os.close(waits)

    def read(self) -> Readings:
        """All facts as they are now; only once. Never raises; what goes wrong makes it ask anew."""
        os.close(self._tell)
        left = max(PREPARED_SECONDS, DEVICE_SECONDS - (time.monotonic() - self._began))
        readings, completed = Readings(), self._child.collect(left)
        for line in completed.stdout.splitlines():
            readings.take(line)
        if completed.ok:
            return readings
        if not completed.timed_out:
            return read()
        # Anew, a start that hangs would hang as long again.
        return readings if _is_over(readings, _silence(DEVICE_SECONDS)) else read(readings)


def read(readings: Readings | None = None) -> Readings:
    """All facts NVML gives, with those that are there already. Never raises; bounded by ALL_SECONDS."""
    readings = Readings() if readings is None else readings
    deadline = time.monotonic() + ALL_SECONDS
    while (left := deadline - time.monotonic()) > 0:
        if _is_over(readings, _run_child(readings, min(DEVICE_SECONDS, left))):
            return readings
    readings.problem = readings.problem or _silence(ALL_SECONDS)
    return readings


def _is_over(readings: Readings, failure: str) -> bool:
    """After a child: whether no other is worth it. What failed at a device is told of it; the others are left."""
    if readings.reading is None:
        readings.problem = readings.problem or failure
        return True
    index, readings.reading = readings.reading, None
    readings.gpus[index] = Gpu(index, "", "", None, None, problem=_crash_problem(index, failure))
    return False


def _silence(seconds: float) -> str:
    return f"NVML did not answer within {seconds:g} s"


def _run_child(readings: Readings, timeout: float) -> str:
    """One child over the devices not read yet; how it failed, or nothing."""
    argv = commands.python_module(PROBE_MODULE, child_of_us(), *map(str, readings.gpus))
    try:
        completed = commands.run(argv, timeout=timeout, cwd="/")
    except OSError as error:
        return f"NVML could not be asked: {error}"
    for line in completed.stdout.splitlines():
        readings.take(line)
    if completed.ok or readings.problem:
        return ""
    last_line = completed.stderr.strip().rpartition("\n")[2]
    if completed.timed_out:
        return _silence(timeout)
    return f"NVML's probe {commands.describe_status(completed.status)}" + (f": {last_line}" if last_line else "")


def _crash_problem(index: int, failure: str) -> str:
    return f"GPU {index}: {failure}; look for Xid 79 ('GPU has fallen off the bus') in the kernel log"

"""Which processes use CUDA, asked in a bounded child process: `python -m gpuckpt.accelerators.cuda_probe < PIDS`.

A driver call about a process can block (https://github.com/NVIDIA/cuda-checkpoint/issues/30), and a
blocked call cannot be taken back; so facts are asked for in a process that can be given up.
"""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING

from gpuckpt.accelerators import asking
from gpuckpt.accelerators.orphans import child_of_us, end_with_parent
from gpuckpt.accelerators.protocol import DriverError
from gpuckpt.model.errors import MachineLacks
from gpuckpt.model.facts import CudaProcess, ProcessId
from gpuckpt.system import commands, procfs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gpuckpt.accelerators.protocol import Suspender

TIMEOUT_SECONDS = 60.0
STATE_SECONDS = 10.0


class ProbeFailed(Exception):
    """The driver did not answer, or answered with an error; the message is for the user."""


class Asking:
    """A probe that loads the driver's library while it is not known yet about which processes it will be asked."""

    def __init__(self, *, force_program: bool = False) -> None:
        """Raises OSError where it cannot be started."""
        options = [child_of_us(), *(["--program"] if force_program else [])]
        argv = commands.python_module("gpuckpt.accelerators.cuda_probe", *options)
        self._child = commands.start(argv, capture=True, stdin=commands.PIPE, cwd="/")
        self._is_over = False

    def close(self) -> None:
        """The probe has ended afterwards, asked or not."""
        if not self._is_over:
            self._child.kill_group()
            self._child.collect(TIMEOUT_SECONDS)

    def about(self, ids: Sequence[ProcessId]) -> tuple[CudaProcess, ...]:
        """Those that have a CUDA context, with their restore thread and state; only once. Raises ProbeFailed."""
        answer = self._child.collect(TIMEOUT_SECONDS, " ".join(str(one.pid) for one in ids))
        self._is_over = True
        by_pid = {one.pid: one for one in ids}
        try:
            said = json.loads(answer.stdout)
            if "problem" in said:
                raise ProbeFailed(str(said["problem"]))
            return tuple(CudaProcess(by_pid[pid], tid, state) for pid, tid, state in said["found"])
        except (ValueError, TypeError, KeyError):
            raise ProbeFailed(f"the GPU driver gave no answer about the processes: {answer.describe()}") from None


def cuda_processes(ids: Sequence[ProcessId], *, force_program: bool = False) -> tuple[CudaProcess, ...]:
    """The processes that have a CUDA context, with their restore thread and state. Raises ProbeFailed, OSError."""
    return Asking(force_program=force_program).about(ids)


def main() -> None:
    """Print one JSON object: `found` with [pid, restore tid, state] of each CUDA process, or `problem`."""
    from gpuckpt.accelerators import ACCELERATORS  # noqa: PLC0415 - the list names modules that may load libraries

    end_with_parent(sys.argv)
    force_program = "--program" in sys.argv
    accelerator = ACCELERATORS[0]
    try:
        suspender = accelerator.questioner(force_program=force_program)
        pids = [int(word) for word in sys.stdin.read().split()]
        try:
            tids = {pid: tid for pid in pids if (tid := _restore_tid(suspender, pid)) is not None}
        except DriverError:
            accelerator.suspender(force_program=force_program)  # which may know why, in better words
            raise
        states = asking.states_of(_answering(list(tids)), suspender, STATE_SECONDS)
    except MachineLacks as error:
        answer: dict[str, object] = {"problem": error.message}
    except DriverError as error:
        answer = {"problem": error.explain()}
    else:
        answer = {"found": [(pid, tid, states.get(pid, "unknown")) for pid, tid in tids.items()]}
    sys.stdout.write(json.dumps(answer))
    sys.stdout.flush()
    os._exit(0)  # a question that is never answered must not keep us


def _restore_tid(suspender: Suspender, pid: int) -> int | None:
    """The restore thread; None also for a process that has ended since it was listed."""
    try:
        return suspender.restore_tid(pid)
    except DriverError:
        if procfs.process_id(pid) is None:
            return None
        raise


def _answering(pids: list[int]) -> list[int]:
    """Without the stopped ones: they do not answer (seen with driver 580)."""
    found = ((pid, procfs.process_id(pid)) for pid in pids)
    return [pid for pid, identity in found if identity and procfs.state(identity) not in ("T", "t")]


if __name__ == "__main__":
    main()

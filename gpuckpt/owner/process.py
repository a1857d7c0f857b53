"""The owner's main program: `python -m gpuckpt.owner.process FD [RUN-DIRECTORY]`, FD being its end of the conversation.

Without a directory it is a spare one (owner/handle.py): it waits for a run first, and ends where none comes.

It has a session of its own, is the last the OOM killer takes, ignores the terminal's signals, and lives
until its order is carried out, whatever becomes of main.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import sys
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpuckpt.accelerators import ACCELERATORS
from gpuckpt.model.errors import MachineLacks
from gpuckpt.model.facts import GpuDriver
from gpuckpt.owner import hostchanges, runs
from gpuckpt.owner.criurun import OPEN_FILES
from gpuckpt.owner.dumping import dump
from gpuckpt.owner.journal import Journal
from gpuckpt.owner.messages import JOIN, Channel, DumpOrder, Order, PeerGone, RepairOrder, RestoreOrder, order_from_json
from gpuckpt.owner.repairing import repair
from gpuckpt.owner.restoring import restore
from gpuckpt.owner.unwind import Means
from gpuckpt.system import procfs

if TYPE_CHECKING:
    from gpuckpt.accelerators.protocol import Suspender


def main() -> None:
    """Carry out one order."""
    end = socket.socket(fileno=int(sys.argv[1]))
    channel = Channel(end)
    _become_owner()
    directory = Path(sys.argv[2]) if len(sys.argv) > 2 else _await_run(end, channel)
    if directory is None:
        return
    try:
        message = _await_order(channel)
    except PeerGone:
        _leave(channel, directory)
        return
    order = order_from_json(message)
    journal = Journal(Path(order.run_directory))
    own = procfs.process_id(os.getpid())
    journal.write("owner-started", pid=os.getpid(), start_ticks=own.start_ticks if own else 0)
    journal.write("order", kind=message["kind"], order=message["order"])
    _carry_out(order, channel, journal)
    _leave(channel, Path(order.run_directory))
    # A driver call that never returned must not keep us: its thread ends with the process.
    sys.stderr.flush()
    os._exit(0)


def _await_run(end: socket.socket, channel: Channel) -> Path | None:
    """The directory of the run; its lock is held from here on, and its log has what we print. None: there is none."""
    try:
        _, descriptors, _, _ = socket.recv_fds(end, len(JOIN), 2)
        message = channel.receive() if len(descriptors) == 2 else None
    except (OSError, PeerGone):
        return None
    if message is None:
        return None
    _lock, log = descriptors  # the lock stays open as long as we live
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    return Path(message["directory"])


def _await_order(channel: Channel) -> dict[str, Any]:
    """The order. Main may take long to prepare what the order is about, and says meanwhile that it is alive.

    Raises PeerGone when none will come.
    """
    while (message := channel.receive()) is None or message["say"] != "order":
        if message is not None and message["say"] == "abort":
            raise PeerGone
    return message


def _leave(channel: Channel, run_directory: Path) -> None:
    """Put right what a crash of ours, or a main that was killed, has left changed."""
    hostchanges.put_back(run_directory)
    if channel.peer_is_gone:
        runs.remove_if_settled(run_directory)


def _become_owner() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    os.umask(0o077)
    procfs.set_own_oom_score_adj(-1000)
    with contextlib.suppress(ValueError, OSError):
        hard = max(resource.getrlimit(resource.RLIMIT_NOFILE)[1], OPEN_FILES)
        resource.setrlimit(resource.RLIMIT_NOFILE, (OPEN_FILES, hard))


def _carry_out(order: Order, channel: Channel, journal: Journal) -> None:
    try:
        driver = _Driver()
        means = Means(_suspender(order), journal, driver, _deadline(order), driver.get_ready)
        if isinstance(order, DumpOrder):
            dump(order, channel, means)
        elif isinstance(order, RestoreOrder):
            restore(order, channel, means)
        else:
            repair(order, channel, means)
    except MachineLacks as error:
        _tell(channel, "lacks", message=error.message, hint=error.hint)
    except Exception:  # noqa: BLE001 - the last line: main must hear of it and repair
        traceback.print_exc()
        journal.write("crashed", traceback=traceback.format_exc())
        _tell(channel, "crashed", traceback=traceback.format_exc())


def _tell(channel: Channel, say: str, **content: object) -> None:
    with contextlib.suppress(PeerGone):
        channel.send(say, **content)


def _deadline(order: Order) -> float | None:
    seconds = order.deadline_seconds
    return None if seconds is None else time.monotonic() + seconds


def _suspender(order: Order) -> Suspender | None:
    """What suspends and resumes this tree's GPU side; None where it has none. Raises MachineLacks."""
    if not order.tree.cuda:
        return None
    present = [accelerator for accelerator in ACCELERATORS if accelerator.present()]
    if not present:
        raise MachineLacks("the tree uses a GPU, but this machine has no GPU driver", "install the NVIDIA driver")
    known = None if isinstance(order, RepairOrder) else order.driver
    return present[0].suspender(force_program=order.force_program, driver=known)


class _Driver:
    """Asks for the GPUs as they are now."""

    def __init__(self) -> None:
        self._accelerator = next((one for one in ACCELERATORS if one.present()), None)

    def get_ready(self) -> None:
        """It will be asked soon."""
        if self._accelerator is not None:
            self._accelerator.get_ready()

    def __call__(self) -> GpuDriver:
        return GpuDriver() if self._accelerator is None else self._accelerator.driver()


if __name__ == "__main__":
    main()

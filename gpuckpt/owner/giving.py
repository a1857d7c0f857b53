"""A tree that is given to another host: from `given` on it may run here only when its copy there is known not to.

CRIU at the gate lets the tree go on as soon as its script, the owner or CRIU itself is killed. So every process is
sent a SIGSTOP first, which CRIU's ptrace keeps back: whoever is killed from then on, the tree comes out stopped,
before an instruction of it has run. What happens to it then is decided by the journal (owner/repairing.py):

given         main may have sent `go`, or may not: held
runs-there    the other host has answered: the tree here ends
taken-back    the other host has answered that its copy never ran and never will: the tree here goes on
held          main gave up asking: held, until somebody says `gpuckpt restore --tree PID`, or ends it
"""

from __future__ import annotations

import signal
import time
from typing import TYPE_CHECKING

from gpuckpt.system import procfs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gpuckpt.model.facts import ProcessId
    from gpuckpt.owner.messages import TreeOrder

STOP_SECONDS = 5.0


class Held(Exception):
    """Nobody knows whether the tree runs on the other host: it must not run here, and must not end."""


def stop_all(tree: TreeOrder) -> None:
    """Let no process of the tree run an instruction once whoever holds it now lets go."""
    for identity in _living(tree):
        procfs.send(identity, signal.SIGSTOP)


def continue_all(tree: TreeOrder) -> None:
    """Take that back, also where it has not come to anything yet: a SIGCONT cancels stops that are on their way.

    A suspended CUDA process was stopped before, and waits for its GPU memory: it is left to the unwind.
    """
    if not tree.cuda:
        for identity in _living(tree):
            procfs.send(identity, signal.SIGCONT)


def await_stopped(tree: TreeOrder) -> None:
    """Give the stops a moment to show in /proc."""
    deadline = time.monotonic() + STOP_SECONDS
    while time.monotonic() < deadline and any(procfs.state(one) not in ("T", *procfs.ENDED) for one in _living(tree)):
        time.sleep(0.01)


def lock_stays(kept_addresses: Sequence[str]) -> bool:
    """Whether CRIU's network lock is still needed here once the tree runs on the other host.

    Where an address of its kept connections is still here as well, packets for them that come here would be answered
    with a reset. Else the lock must go: a tree that comes back one day would find even its inner connections dead.
    """
    return len(procfs.missing_addresses(kept_addresses)) < len(kept_addresses)


def _living(tree: TreeOrder) -> list[ProcessId]:
    """Without those that its user had stopped: they stay as they are."""
    return [one for one in tree.ids if one not in tree.stopped and procfs.state(one) not in procfs.ENDED]

"""restore --wait: stay with the job until it ends; its terminal and its signals go through us."""

from __future__ import annotations

import select
import signal
import time
from typing import TYPE_CHECKING

from gpuckpt.flows.conversation import STEP_SECONDS, OwnerGone, tell
from gpuckpt.model.errors import RestoredUnhealthy
from gpuckpt.owner.messages import PeerGone

if TYPE_CHECKING:
    from gpuckpt.flows.interruption import Interruption
    from gpuckpt.owner.handle import OwnerHandle
    from gpuckpt.system.terminal import PtyRelay

DRAIN_SECONDS = 1.0

PASSED_ON = (signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT, signal.SIGWINCH, signal.SIGALRM)
"""These go to the job as well as INT, TERM and HUP."""


class JobWait:
    """The wait for a restored job whose parent is the owner."""

    def __init__(self, owner: OwnerHandle, relay: PtyRelay | None, interruption: Interruption) -> None:
        self._owner = owner
        self._relay = relay
        self._interruption = interruption

    def until_it_ends(self) -> int:
        """Stay until the job ends; signals and terminal go through. Returns its exit status (128+n for signal n)."""
        caught: list[int] = []
        before = {number: signal.signal(number, lambda n, _: caught.append(n)) for number in PASSED_ON}
        try:
            if self._relay is not None:
                self._relay.start()
            while True:
                self._pass_on(caught)
                status = self._step()
                if status is not None:
                    self._drain()
                    return status if status >= 0 else 128 - status
        except (OwnerGone, PeerGone):
            raise RestoredUnhealthy(
                "the process that waited for the job was killed; the job runs on without it", process="restored"
            ) from None
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _pass_on(self, caught: list[int]) -> None:
        if self._interruption.caught is not None:
            caught.append(self._interruption.caught)
            self._interruption.caught = None
        while caught:
            number = caught.pop(0)
            if number == signal.SIGWINCH and self._relay is not None:
                self._relay.copy_window_size()
            else:
                tell(self._owner, "signal", number=number)

    def _step(self) -> int | None:
        """One round of listening; the job's status once it has ended."""
        sources = [self._owner.channel.fileno(), *(self._relay.sources() if self._relay else ())]
        ready = [] if self._owner.channel.waiting() else select.select(sources, [], [], STEP_SECONDS)[0]
        if self._relay is not None:
            self._relay.pump(ready)
        message = self._owner.channel.receive(0)
        return int(message["status"]) if message is not None and message["say"] == "exited" else None

    def _drain(self) -> None:
        """What the job wrote last is still in the pty."""
        if self._relay is None:
            return
        # It reaches the master by way of a kernel worker, a moment later. Processes that outlive the root may go on
        # writing for ever.
        until = time.monotonic() + DRAIN_SECONDS
        while select.select([self._relay.master], [], [], STEP_SECONDS)[0] and self._relay.pump([self._relay.master]):
            if time.monotonic() > until:
                return

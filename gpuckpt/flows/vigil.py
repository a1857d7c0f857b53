"""Looking around while a migration waits for the other host: signals, the deadline, and what the owner says."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpuckpt.flows.conversation import LAST_WORDS, OwnerGone, OwnerSays
from gpuckpt.flows.interruption import Interruption
from gpuckpt.model.report import Event
from gpuckpt.owner.messages import PeerGone

if TYPE_CHECKING:
    from gpuckpt.flows.machine import Machine
    from gpuckpt.owner.handle import OwnerHandle


class Vigil(Interruption):
    """An interruption that also hears the owner: a tree that has gone on by itself is not sent away."""

    def __init__(self, owner: OwnerHandle, machine: Machine, interruption: Interruption) -> None:
        super().__init__(None)
        self._owner, self._machine, self._inner = owner, machine, interruption

    def check(self) -> None:
        """Raises BrokenOff, OwnerSays, OwnerGone."""
        self._inner.check()
        try:
            message = self._owner.channel.receive(0)
        except PeerGone:
            raise OwnerGone from None
        if message is None:
            return
        for note in message.get("notes", ()):
            self._machine.listener(Event("host", "note", note))
        if message["say"] in LAST_WORDS:
            raise OwnerSays(message)

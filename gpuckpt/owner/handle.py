"""Main's side of the owner: start it, give it its order, listen to it, and notice when it dies."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from typing import TYPE_CHECKING, Any

from gpuckpt.owner.messages import Channel, Order, PeerGone, order_to_json
from gpuckpt.system import commands

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gpuckpt.owner.runs import Run


OWNER_LOG = "owner.log"
"""What the owner prints (tracebacks), in the directory of its run."""


BEAT_SECONDS = 2.0


class OwnerHandle:
    """A started owner. Use as a context manager: leaving it closes our end, which tells the owner to unwind."""

    def __init__(self, run: Run, *, pass_fds: Sequence[int] = ()) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        log = os.open(run.directory / OWNER_LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            self._child = commands.start(
                commands.python_module("gpuckpt.owner.process", str(theirs.fileno()), str(run.directory)),
                cwd="/",
                output=log,
                pass_fds=(theirs.fileno(), run.lock_fd, *pass_fds),
                new_session=True,
            )
        finally:
            theirs.close()
            os.close(log)
        self.channel = Channel(ours)
        self._over = threading.Event()
        threading.Thread(target=self._beat, daemon=True).start()

    def _beat(self) -> None:
        """Say that we live: an owner at CRIU's gate must not wait for a main that was stopped."""
        with contextlib.suppress(PeerGone):
            while not self._over.wait(BEAT_SECONDS):
                self.channel.send("alive")

    def __enter__(self) -> OwnerHandle:  # noqa: PYI034 - typing.Self comes with 3.11
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self.channel.close()

    @property
    def pid(self) -> int:
        """The owner's process id."""
        return self._child.pid

    def give(self, order: Order) -> None:
        """Hand over the order."""
        message = order_to_json(order)
        self.channel.send(**message)

    def say(self, word: str, **content: Any) -> None:
        """Send a word (`commit`, `abort`, `signal`); raises PeerGone."""
        self.channel.send(word, **content)

    def reap(self, timeout: float) -> bool:
        """Wait for the owner's end, so that it is no zombie of ours; False when it still lives."""
        return self._child.wait(timeout) is not None

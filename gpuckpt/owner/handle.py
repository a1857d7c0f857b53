"""Main's side of the owner: start it, give it its order, listen to it, and notice when it dies."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
from typing import TYPE_CHECKING, Any

from gpuckpt.owner.messages import JOIN, Channel, Order, PeerGone, order_to_json
from gpuckpt.system import commands

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from gpuckpt.owner.runs import Run
    from gpuckpt.system.commands import Child


OWNER_LOG = "owner.log"
"""What the owner prints (tracebacks), in the directory of its run."""


BEAT_SECONDS = 2.0
END_SECONDS = 5.0


class SpareOwner:
    """An owner that has loaded what it needs and waits for its run: that takes a third of a second otherwise.

    It ends when its other end is closed, by us or with us.
    """

    def __init__(self) -> None:
        """Raises OSError where it cannot be started."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with theirs:
            argv = commands.python_module("gpuckpt.owner.process", str(theirs.fileno()))
            self.child = commands.start(argv, cwd="/", pass_fds=(theirs.fileno(),), new_session=True)
        self._end: socket.socket | None = ours

    def take(self, run: Run, log: int) -> socket.socket | None:
        """Give it its run, whose lock it shares from now on; our end of it, or None where it is gone."""
        end, self._end = self._end, None
        if end is None:
            return None
        try:
            socket.send_fds(end, [JOIN], [run.lock_fd, log])
            end.sendall(json.dumps({"say": "run", "directory": str(run.directory)}).encode() + b"\n")
        except OSError:
            end.close()
            self.child.wait(END_SECONDS)
            return None
        return end

    def close(self) -> None:
        """It is not needed. It has nothing in hand, and may still be loading: it is not asked."""
        if self._end is not None:
            self._end.close()
            self._end = None
            self.child.kill_group()
            self.child.wait(END_SECONDS)


@contextlib.contextmanager
def spare_owner(*, wanted: bool) -> Iterator[SpareOwner | None]:
    """An owner that starts while others still look at facts; None where none is wanted, or none can be started."""
    spare = None
    if wanted:
        with contextlib.suppress(OSError):
            spare = SpareOwner()
    try:
        yield spare
    finally:
        if spare is not None:
            spare.close()


class OwnerHandle:
    """A started owner. Use as a context manager: leaving it closes our end, which tells the owner to unwind."""

    def __init__(self, run: Run, *, pass_fds: Sequence[int] = (), spare: SpareOwner | None = None) -> None:
        """`spare` is used where no descriptors are passed and it still lives."""
        log = os.open(run.directory / OWNER_LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            taken = spare.take(run, log) if spare is not None and not pass_fds else None
            if spare is not None and taken is not None:
                ours, self._child = taken, spare.child
            else:
                ours, self._child = _started(run, log, pass_fds)
        finally:
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


def _started(run: Run, log: int, pass_fds: Sequence[int]) -> tuple[socket.socket, Child]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with theirs:
        child = commands.start(
            commands.python_module("gpuckpt.owner.process", str(theirs.fileno()), str(run.directory)),
            cwd="/",
            output=log,
            pass_fds=(theirs.fileno(), run.lock_fd, *pass_fds),
            new_session=True,
        )
    return ours, child

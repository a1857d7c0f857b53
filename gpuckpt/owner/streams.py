"""The ends outside of the tree that a restored one gets: files, descriptors of main's, a terminal."""

from __future__ import annotations

import errno
import os

from gpuckpt.owner.messages import INHERITED_FD, Inherited
from gpuckpt.owner.suspension import ResumeFailed


class Streams:
    """What was opened for CRIU, until it has it."""

    def __init__(self, terminal: str | None) -> None:
        """`terminal`: the pty slave that the tree shall have."""
        self._terminal = terminal
        self._opened: list[int] = []
        self.joined: int | None = None
        """The terminal, once it is our session's."""

    def open(self, entry: Inherited) -> int:
        """A descriptor for this end. Raises OSError, and ResumeFailed where nobody reads a FIFO."""
        if entry.path.startswith(INHERITED_FD):
            return int(entry.path.removeprefix(INHERITED_FD))
        if entry.path == self._terminal:
            return self._keep(os.open(entry.path, os.O_RDWR | os.O_NOCTTY))
        flags = os.O_RDWR if entry.readable and entry.writable else os.O_WRONLY if entry.writable else os.O_RDONLY
        flags |= os.O_CREAT | os.O_APPEND if entry.writable else 0
        try:
            # A FIFO without a reader would hold us for ever, in a call that no deadline ends.
            descriptor = os.open(entry.path, flags | os.O_NOCTTY | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
        except OSError as error:
            if error.errno != errno.ENXIO:
                raise
            raise ResumeFailed(f"nobody reads {entry.path}: start its reader first") from None
        os.set_blocking(descriptor, True)
        return self._keep(descriptor)

    def _keep(self, descriptor: int) -> int:
        self._opened.append(descriptor)
        return descriptor

    def join_terminal(self) -> int:
        """Make the pty the terminal of our session, which the restored job joins: it must not end before the job."""
        assert self._terminal is not None  # noqa: S101 - the caller looked
        # The first terminal that a session leader opens becomes its own.
        self.joined = self._keep(os.open(self._terminal, os.O_RDWR))
        return self.joined

    def close(self) -> None:
        """Close them all."""
        for descriptor in self._opened:
            os.close(descriptor)

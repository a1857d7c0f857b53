"""A pty for a restored job, relayed to where gpuckpt runs: the one home of terminals."""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import termios
import time
import tty

CHUNK_BYTES = 65536
STDIN, STDOUT = 0, 1


class PtyRelay:
    """A pty whose slave the job gets and whose master is copied to and from our own stdin and stdout.

    On a terminal our side is put into raw mode, so that keys reach the job as they are; `close` puts it
    back. Without a terminal bytes are copied all the same.
    """

    def __init__(self) -> None:
        self.master, self._slave = os.openpty()
        self.slave_path = os.ttyname(self._slave)
        os.set_inheritable(self.master, False)  # noqa: FBT003 - its signature
        self._saved = termios.tcgetattr(STDIN) if os.isatty(STDIN) else None
        self._stdin_open = True
        self.copy_window_size()

    def start(self) -> None:
        """The job has the slave open: ours goes, so that its last close shows, and keys go through."""
        os.close(self._slave)
        self._slave = -1
        self.copy_window_size()  # the restore set the one of the dump
        if self._saved is not None:
            tty.setraw(STDIN)

    def sources(self) -> list[int]:
        """Descriptors to select on."""
        return [self.master, STDIN] if self._stdin_open else [self.master]

    def pump(self, ready: list[int]) -> bool:
        """Copy what is ready; False when the job has closed its last end."""
        if STDIN in ready:
            self._copy_input()
        return self._copy_output() if self.master in ready else True

    def _copy_input(self) -> None:
        content = os.read(STDIN, CHUNK_BYTES)
        if not content:
            self._stdin_open = False  # the end of our input is not the end of the job's terminal
            return
        _write_all(self.master, content)

    def _copy_output(self) -> bool:
        try:
            content = os.read(self.master, CHUNK_BYTES)
        except OSError:
            return False  # EIO: no slave is open any more
        _write_all(STDOUT, content)
        return bool(content)

    def copy_window_size(self) -> None:
        """Give the job our window's size."""
        if os.isatty(STDIN):
            size = fcntl.ioctl(STDIN, termios.TIOCGWINSZ, b"\0" * 8)
            fcntl.ioctl(self.master, termios.TIOCSWINSZ, size)

    def close(self) -> None:
        """Put our terminal back and close both ends."""
        if self._saved is not None:
            with contextlib.suppress(termios.error):
                termios.tcsetattr(STDIN, termios.TCSADRAIN, self._saved)
        os.close(self.master)
        if self._slave >= 0:
            os.close(self._slave)


def discard(master: int, seconds: float) -> None:
    """Take what is written to a terminal that nobody looks at any more, so that its writers need not wait."""
    if not select.select([master], [], [], seconds)[0]:
        return
    try:
        os.read(master, CHUNK_BYTES)
    except OSError:
        time.sleep(seconds)  # EIO: nobody has it open just now


def make_foreground(descriptor: int, group: int) -> None:
    """Give the terminal of our session to a process group: its keys' signals go there, and it may read."""
    before = signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    try:
        os.tcsetpgrp(descriptor, group)
    finally:
        signal.signal(signal.SIGTTOU, before)


def _write_all(descriptor: int, content: bytes) -> None:
    while content:
        content = content[os.write(descriptor, content) :]

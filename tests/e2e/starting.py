"""Jobs as cron, sshd, systemd and a shell start them, with the standard streams that those give."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import select
import socket
import struct
import subprocess
import sys
import termios
import threading
from dataclasses import dataclass
from pathlib import Path

from tests import harness
from tests.e2e import rounds
from tests.harness import PROGRAMS, Jobs

GPUCKPT = (sys.executable, "-m", "gpuckpt")
TALKER = f"{sys.executable} {PROGRAMS / 'talker.py'}"

STREAMS = {"cron": (1,), "systemd": (1,), **dict.fromkeys(("ssh", "ssh -t", "shell", "script"), (0, 1, 2))}
"""The streams that lead outside, each a thing of its own: cron and systemd give one for output and errors."""


@dataclass
class Started:
    """A started job, the test's ends of its streams, and what reads them dry."""

    pid: int
    ends: list[int]
    reader: threading.Thread | None = None

    def close(self) -> None:
        """The far ends go, as when an ssh session ends."""
        for end in self.ends:
            with contextlib.suppress(OSError):
                os.close(end)


def start(jobs: Jobs, how: str, kind: str, log: Path) -> Started:
    """A talker with its streams of this kind, started in this manner; it has begun to count."""
    theirs, ours = _streams(kind, STREAMS[how])
    first = {fd: theirs.get(fd, subprocess.DEVNULL) for fd in (0, 1, 2)}
    if 2 not in theirs:
        first[2] = theirs[1]
    command = f"{TALKER} {log}"
    # cron and sshd start a shell that stays; systemd the program itself; a shell at a prompt gives the job a group
    # of its own, a script does not.
    below = f"{command} <&0; exec sleep 1000"
    line = {"cron": f"{command}; :", "ssh": f"{command}; :", "shell": f"set -m; {below}", "script": below}.get(
        how, f"exec {command}"
    )
    child = jobs.start(
        "/bin/sh",
        "-c",
        line,
        stdin=first[0],
        stdout=first[1],
        stderr=first[2],
        preexec_fn=_take_terminal if kind == "pty" and 0 in STREAMS[how] else None,
    )
    for descriptor in set(theirs.values()):
        os.close(descriptor)
    reader = _drained(ours)
    harness.wait_for_count(log, 2)
    pid = rounds.descendants(child.pid)[1] if how in ("shell", "script") else child.pid
    jobs.adopt(*rounds.descendants(child.pid))
    return Started(pid, ours, reader)


def _take_terminal() -> None:
    fcntl.ioctl(1, termios.TIOCSCTTY, 0)


def _streams(kind: str, fds: tuple[int, ...]) -> tuple[dict[int, int], list[int]]:
    """(the job's descriptors by number, ours)."""
    if kind == "pty":
        master, slave = os.openpty()
        return dict.fromkeys(fds, slave), [master]
    theirs, ours = {}, []
    for fd in fds:
        if kind == "pipe":
            out, into = os.pipe()
            theirs[fd], end = (out, into) if fd == 0 else (into, out)
        else:
            theirs[fd], end = (one.detach() for one in socket.socketpair())
        ours.append(end)
    return theirs, ours


def _drained(ends: list[int]) -> threading.Thread:
    """Read what the job says, so that it never waits for us."""
    copies = [os.dup(end) for end in ends]

    def read() -> None:
        open_ends = set(copies)
        while open_ends:
            for end in select.select(list(open_ends), [], [])[0]:
                try:
                    said = os.read(end, 65536)
                except OSError:
                    said = b""
                if not said:
                    open_ends.discard(end)
        for end in copies:
            os.close(end)

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    return thread


class Terminal:
    """A program at a terminal: what it prints and what is typed."""

    def __init__(self, jobs: Jobs, *argv: object, rows: int = 33, columns: int = 99) -> None:
        self.master, slave = pty.openpty()
        self.resize(rows, columns)
        self.before = termios.tcgetattr(self.master)
        self.process = jobs.start(*argv, stdin=slave, stdout=slave, stderr=slave, preexec_fn=_take_terminal)
        os.close(slave)
        self.text = ""

    def resize(self, rows: int, columns: int) -> None:
        """The window gets another size."""
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def type(self, keys: str) -> None:
        """As at the keyboard."""
        os.write(self.master, keys.encode())

    def see(self, wanted: str) -> None:
        """Until this text is on the screen (what came before it is forgotten)."""

        def seen() -> bool:
            self._read()
            return wanted in self.text

        try:
            harness.wait_for(seen, repr(wanted))
        except AssertionError:
            raise AssertionError(f"{wanted!r} never came, but {self.text[-2000:]!r}") from None
        self.text = self.text.partition(wanted)[2]

    def _read(self) -> None:
        while select.select([self.master], [], [], 0)[0]:
            try:
                said = os.read(self.master, 65536)
            except OSError:
                return
            self.text += said.decode("utf-8", "replace")

    def status(self) -> int:
        """Its exit status, after all it had to say."""

        def ended() -> bool:
            self._read()
            return self.process.poll() is not None

        harness.wait_for(ended, "gpuckpt ends")
        return self.process.returncode

    def close(self) -> None:
        """The window is closed."""
        os.close(self.master)

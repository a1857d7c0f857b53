"""Running a user's own command line, a hook or a probe: bounded in time and output, ended with its process group."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections import deque
from typing import TYPE_CHECKING

from gpuckpt.model.records import dataclass
from gpuckpt.system import commands

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

STEP_SECONDS = 0.05
GRACE_SECONDS = 5.0
"""Between SIGTERM and SIGKILL."""
REAP_SECONDS = 5.0
"""After SIGKILL: a process in an uninterruptible wait ends when the kernel lets it."""
LAST_LINES = 3
"""What is kept of the output, to say why it failed."""
MOST_LINES = 1000
"""Lines that are passed on; what says more is not listened to."""
LONGEST_LINE = 1000
READ_BYTES = 1 << 16
LAST_READS = 16
"""What is still in the pipe when the command has ended; others may hold it open, and write on for ever."""


@dataclass(frozen=True, slots=True)
class Ended:
    """How a command line ended."""

    status: int
    """Exit status; -n when signal n ended it."""
    last_lines: tuple[str, ...] = ()
    timed_out: bool = False
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """By itself, with status 0, in time."""
        return self.status == 0 and not self.timed_out

    def describe(self) -> str:
        """How it ended, and what it said last: 'exited with 3: no such server'."""
        how = "did not end in time" if self.timed_out else commands.describe_status(self.status)
        return ": ".join(part for part in (how, " / ".join(self.last_lines)) if part)


def run_line(
    line: str,
    environment: Mapping[str, str],
    *,
    timeout: float,
    hear: Callable[[str], None] = lambda _: None,
    check: Callable[[], None] = lambda: None,
) -> Ended:
    """Run a command line to its end and no further: what it leaves running in the background is left alone.

    `hear` gets its output by lines. After `timeout` seconds, or when `check` raises, its process group gets SIGTERM,
    and SIGKILL GRACE_SECONDS later. Raises what `check` raises, and OSError when it cannot be started.
    """
    began = time.monotonic()
    child = commands.start_line(line, environment)
    output = Output(child, hear)
    timed_out = False
    try:
        while not child.has_ended:
            check()
            output.read(STEP_SECONDS)
            if time.monotonic() - began >= timeout:
                timed_out = True
                break
    except BaseException:
        end_group(child, output)
        raise
    else:
        if timed_out:
            end_group(child, output)
    finally:
        output.close()
        status = child.wait(REAP_SECONDS)
    return Ended(
        -signal.SIGKILL if status is None else status, tuple(output.last_lines), timed_out, time.monotonic() - began
    )


def end_group(child: commands.Child, output: Output) -> None:
    """SIGTERM, patience, SIGKILL, for all that is in the process group; what left it (a daemon) is not reached."""
    child.signal_group(signal.SIGTERM)
    # A stopped process gets a SIGTERM only when it goes on.
    child.signal_group(signal.SIGCONT)
    deadline = time.monotonic() + GRACE_SECONDS
    while not child.has_ended and time.monotonic() < deadline:
        output.read(STEP_SECONDS)
    child.signal_group(signal.SIGKILL)


class Output:
    """What a command says, by lines: passed on, and the last of it kept."""

    def __init__(self, child: commands.Child, hear: Callable[[str], None]) -> None:
        assert child.process.stdout is not None  # noqa: S101 - start_line asks for a pipe
        self._pipe = child.process.stdout
        self._open = True
        self._hear = hear
        self._heard = 0
        self._rest = b""
        self.last_lines: deque[str] = deque(maxlen=LAST_LINES)
        os.set_blocking(self._pipe.fileno(), False)

    def read(self, seconds: float) -> bool:
        """Take what is there, waiting at most so long for it; False where nothing was."""
        if not self._open:
            time.sleep(seconds)
            return False
        if not select.select([self._pipe], [], [], seconds)[0]:
            return False
        raw = b""
        with contextlib.suppress(BlockingIOError):
            raw = os.read(self._pipe.fileno(), READ_BYTES)
            self._open = bool(raw)
        for line in self._lines(raw):
            self._say(line)
        return bool(raw)

    def _lines(self, raw: bytes) -> Iterator[bytes]:
        *lines, rest = (self._rest + raw).split(b"\n")
        yield from lines
        # Bounded whatever the command says.
        self._rest = rest[:LONGEST_LINE]

    def _say(self, line: bytes) -> None:
        text = line[:LONGEST_LINE].decode("utf-8", "replace").strip()
        if not text:
            return
        self.last_lines.append(text)
        self._heard += 1
        if self._heard <= MOST_LINES:
            self._hear(text)
        elif self._heard == MOST_LINES + 1:
            self._hear("(more is not shown)")

    def close(self) -> None:
        """Take what is left, without waiting for who else holds the pipe."""
        for _ in range(LAST_READS):
            if not (self._open and self.read(0)):
                break
        self._say(self._rest)
        self._pipe.close()

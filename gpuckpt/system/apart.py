"""Two processes instead of one: one reads what another host sends and has given up root; one keeps its rights for it.

The one that keeps them reads nothing from the network. It starts ssh, with few commands, passes its streams on,
and does the few errands that were named before the two parted. Each ends when the other does.

    keeper (root) ──fork──> confined: the whole command, its screen, its exit status
       │   <── errand, or "ssh" ──   over a socket pair
       └─ ssh, as whoever called sudo, its stream and stderr handed over (SCM_RIGHTS), with a third
          socket for its end: the confined one closes it or says "k" to kill, the keeper says the status
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import select
import signal
import socket
import struct
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from gpuckpt.system import commands, procfs
from gpuckpt.system.confinement import confine, end_with_parent
from gpuckpt.system.links import LinkLost
from gpuckpt.system.ssh import END_SECONDS, Started

if TYPE_CHECKING:
    from gpuckpt.system.confinement import Keep
    from gpuckpt.system.ssh import OwnSsh, Process

LOOK_SECONDS = 0.1
MOST_WORDS = 256 << 10
PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
SSH = "ssh"

Errand = Callable[[dict[str, Any]], dict[str, Any]]
MayRun = Callable[[str], bool]


class Confined:
    """The keeper, as the confined process sees it: whom it asks."""

    def __init__(self, channel: socket.socket, missing: tuple[str, ...]) -> None:
        self._channel = channel
        self._one_at_a_time = threading.Lock()
        self.missing = missing
        """What of the confinement does not hold on this host, in words."""

    def ask(self, errand: str, **words: Any) -> dict[str, Any]:
        """Have an errand done. Raises OSError where the keeper has gone."""
        return self._ask({**words, "do": errand})[0]

    def start(self, command: str | None, *, further: bool) -> Started:
        """Have ssh started, a Starter of system/ssh.py: the keeper knows what it may be. Raises LinkLost."""
        try:
            told, received = self._ask({"do": SSH, "command": command, "further": further})
        except OSError as error:
            raise LinkLost(f"ssh cannot be asked for: {error.strerror}") from None
        if "error" in told:
            raise LinkLost(str(told["error"]))
        stream, errors, control = received
        return Started(_FarProcess(socket.socket(fileno=control)), socket.socket(fileno=stream), errors)

    def _ask(self, question: dict[str, Any]) -> tuple[dict[str, Any], list[int]]:
        with self._one_at_a_time:
            self._channel.send(json.dumps(question).encode())
            answer, received, _, _ = socket.recv_fds(self._channel, MOST_WORDS, 3, socket.MSG_CMSG_CLOEXEC)
        if not answer:
            raise ConnectionResetError(errno.ECONNRESET, "the process that keeps root's rights has gone")
        return json.loads(answer), received


class _FarProcess:
    """An ssh that the keeper has started."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._status: int | None = None
        self._lock = threading.Lock()

    def wait(self, timeout: float) -> int | None:
        """Wait at most `timeout` seconds for its end; -n for signal n."""
        with self._lock:
            if self._status is None:
                self._control.settimeout(timeout)
                with contextlib.suppress(TimeoutError, BlockingIOError):
                    told = self._control.recv(4)
                    self._status = struct.unpack("=i", told)[0] if told else -signal.SIGKILL
                    self._control.close()
            return self._status

    def kill(self) -> None:
        """SIGKILL it."""
        with contextlib.suppress(OSError):
            self._control.send(b"k")


def part(ssh: OwnSsh, may_run: MayRun, keep: Keep, errands: dict[str, Errand]) -> Confined | int:
    """Go on as two processes. Returns whom to ask in the confined one, its end (-n for signal n) in the keeper.

    ssh is started for SFTP, and with a command of which `may_run` says so. This process has one thread. Raises OSError.
    """
    passed_on = {number for number in PASSED_ON if signal.getsignal(number) is not signal.SIG_IGN}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, passed_on)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    keeper = os.getpid()
    confined = commands.fork()
    if confined == 0:
        ours.close()
        missing = confine(keep)
        end_with_parent(keeper)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return Confined(theirs, missing)
    theirs.close()
    # As the flow has it: who stops the terminal's processes would leave a connection to run into its limit.
    signal.signal(signal.SIGTSTP, signal.SIG_IGN)
    try:
        return _Keeper(confined, ours, ssh, may_run, errands, passed_on, before).attend()
    finally:
        # The confined one has said what there is to say: a late signal must not make this one say something else.
        for number in passed_on:
            signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class _Keeper:
    """Serves the confined process until it ends."""

    def __init__(
        self,
        confined: int,
        channel: socket.socket,
        ssh: OwnSsh,
        may_run: MayRun,
        errands: dict[str, Errand],
        passed_on: set[signal.Signals],
        mask: set[Any],
    ) -> None:
        self._confined, self._channel = confined, channel
        self._ssh, self._may_run, self._errands = ssh, may_run, errands
        self._passed_on, self._mask = passed_on, mask
        self._running: dict[int, tuple[Process, socket.socket]] = {}
        self._ends: dict[int, int] = {}
        """What becomes readable when a process has ended (a pidfd) -> its key in `_running`."""

    def attend(self) -> int:
        """Serve; returns how it has ended."""
        while True:
            asked = select.poll()
            for descriptor in (self._channel.fileno(), *self._running, *self._ends):
                asked.register(descriptor, select.POLLIN)
            ready = {self._ends.get(descriptor, descriptor) for descriptor, _ in asked.poll(LOOK_SECONDS * 1000)}
            self._pass_signals_on()
            for control in list(self._running):
                self._look_at(control, spoken=control in ready)
            if self._channel.fileno() in ready and not self._answer():
                break
        for control in list(self._running):
            self._end(control)
        return os.waitstatus_to_exitcode(os.waitpid(self._confined, 0)[1])

    def _pass_signals_on(self) -> None:
        while self._passed_on and (seen := signal.sigtimedwait(self._passed_on, 0)) is not None:
            # One of the terminal's (si_code above 0) has reached the other process as well.
            if seen.si_code <= 0:
                procfs.send_pid(self._confined, seen.si_signo)

    def _answer(self) -> bool:
        """Answer one question; False when nobody asks any more."""
        try:
            question = self._channel.recv(MOST_WORDS)
        except OSError:
            question = b""
        if not question:
            return False
        try:
            asked = json.loads(question)
            answer, passed = self._start(asked) if asked["do"] == SSH else (self._errands[asked["do"]](asked), [])
        except (ValueError, TypeError, KeyError, RecursionError):
            answer, passed = {"error": "there is no such errand"}, []
        try:
            socket.send_fds(self._channel, [json.dumps(answer).encode()], passed)
        except OSError:
            return False
        finally:
            for descriptor in passed:
                os.close(descriptor)
        return True

    def _start(self, asked: dict[str, Any]) -> tuple[dict[str, Any], list[int]]:
        command = asked["command"]
        if command is not None and not (isinstance(command, str) and self._may_run(command)):
            return {"error": "ssh is not started with that command"}, []
        try:
            started = self._ssh.start(command, further=asked["further"] is True, before_exec=self._unblocked)
        except LinkLost as lost:
            return {"error": str(lost)}, []
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self._running[ours.fileno()] = started.process, ours
        with contextlib.suppress(OSError):  # without one its end is seen at the next look
            self._ends[procfs.end_of_child(started.pid or 0)] = ours.fileno()
        return {}, [started.stream.detach(), started.errors, theirs.detach()]

    def _unblocked(self) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)

    def _look_at(self, control: int, *, spoken: bool) -> None:
        if spoken or self._running[control][0].wait(0) is not None:
            self._end(control)

    def _end(self, control: int) -> None:
        process, ours = self._running.pop(control)
        for descriptor in [watched for watched, key in self._ends.items() if key == control]:
            del self._ends[descriptor]
            os.close(descriptor)
        if process.wait(0) is None:
            process.kill()
        status = process.wait(END_SECONDS)
        with contextlib.suppress(OSError):
            ours.send(struct.pack("=i", -signal.SIGKILL if status is None else status))
        ours.close()

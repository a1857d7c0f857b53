"""SSH through OpenSSH's own client: the one place that starts it.

What ssh knows of a user's configuration, agents, certificates, jump hosts and known hosts is taken from ssh
itself, not imitated; its encryption runs in a process of its own, at 2.4 ms of CPU per MB where paramiko 5.1
took 9 (measured on one machine, AES-GCM, 32 KiB packets). gpuckpt adds what a transfer needs: never a silent
acceptance of a host key, never a question without a terminal, a keepalive, AES-GCM before other ciphers.
"""

from __future__ import annotations

import collections
import os
import socket
import threading
from typing import TYPE_CHECKING, Protocol

from gpuckpt.model.errors import MachineLacks
from gpuckpt.model.records import dataclass
from gpuckpt.system import commands, invoker
from gpuckpt.system.links import STALL_SECONDS, LinkLost, SocketLink

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from gpuckpt.system.links import Pace

KEEPALIVE_SECONDS = 15
CONNECT_SECONDS = 20
RESOLVE_SECONDS = 30.0
END_SECONDS = 5.0
MOST_STDERR = 64 << 10
BUFFER_BYTES = 1 << 20

ALWAYS = (
    "StrictHostKeyChecking=yes",
    "UpdateHostKeys=no",
    "NoHostAuthenticationForLocalhost=no",
    "ClearAllForwardings=yes",
    "ForwardAgent=no",
    "PermitLocalCommand=no",
    "RemoteCommand=none",
    "RequestTTY=no",
    "EscapeChar=none",
    f"ServerAliveInterval={KEEPALIVE_SECONDS}",
    "ServerAliveCountMax=3",
    f"ConnectTimeout={CONNECT_SECONDS}",
)
"""Over whatever the user's configuration says. An unknown host key is refused even where it says otherwise."""

WITHOUT_QUESTIONS = ("BatchMode=yes", "ControlMaster=no", "ControlPath=none")
"""For further connections: one of their own each, or none."""

FAILED = 255
"""ssh's own exit status; any other is the remote program's."""


@dataclass(frozen=True, slots=True)
class Account:
    """Whom to call."""

    host: str
    port: int | None = None
    config: Path | None = None
    """ssh's -F."""
    may_ask: bool = False
    """A person sits at a terminal: ssh may ask for a passphrase, once."""


class Process(Protocol):
    """What a call needs of the ssh that it is."""

    def wait(self, timeout: float) -> int | None:
        """Wait at most `timeout` seconds for its end; -n for signal n, None while it runs."""
        ...

    def kill(self) -> None:
        """SIGKILL it."""


@dataclass(frozen=True, slots=True)
class Started:
    """A running ssh."""

    process: Process
    stream: socket.socket
    """Its stdin and stdout."""
    errors: int
    """Where its stderr can be read."""
    pid: int | None = None
    """Its id, where it is a child of this process."""


class Starter(Protocol):
    """Who starts ssh for one account: this process (OwnSsh), or another one for it (system/apart.py)."""

    def start(self, command: str | None, *, further: bool) -> Started:
        """Start it with a command there, or the SFTP server there (None). Raises LinkLost."""
        ...


class Call:
    """A running ssh: its stream, and what it says on stderr."""

    def __init__(self, child: Process, link: SocketLink, stderr: int) -> None:
        self.link = link
        self._child = child
        self._said = collections.deque[bytes](maxlen=64)
        self._reader = threading.Thread(target=self._listen, args=(stderr,), daemon=True)
        self._reader.start()

    def _listen(self, descriptor: int) -> None:
        # Read on for ever, keep little: a far side that floods stderr must neither block nor fill anything.
        with os.fdopen(descriptor, "rb", buffering=0) as stream:
            while chunk := stream.read(MOST_STDERR // 64):
                self._said.append(chunk)

    def end(self) -> tuple[int | None, str]:
        """Close the stream; ssh's exit status (None where it had to be killed) and its last words."""
        self.link.close()
        status = self._child.wait(END_SECONDS)
        if status is None:
            self._child.kill()
            self._child.wait(END_SECONDS)
        self._reader.join(END_SECONDS)
        return status, b"".join(self._said).decode("utf-8", "replace")

    def close(self) -> None:
        """End it at once."""
        self.link.close()
        self._child.kill()
        self._child.wait(END_SECONDS)


class Caller:
    """Calls one account, as often as there shall be connections."""

    def __init__(
        self,
        account: Account,
        pace: Pace | None = None,
        stall_seconds: float = STALL_SECONDS,
        starter: Starter | None = None,
    ) -> None:
        """Raises MachineLacks where there is no ssh."""
        self.account = account
        self._pace = pace
        self.stall_seconds = stall_seconds
        self._starter: Starter = OwnSsh(account) if starter is None else starter

    def run(self, command: str, *, further: bool = False, poll_seconds: float | None = None) -> Call:
        """Start a command there, a text for the login shell. `further`: without questions, on a connection of its own.

        With `poll_seconds` reading raises Silent that often, as long as nothing comes.
        """
        return self._call(command, further=further, poll_seconds=poll_seconds)

    def sftp(self, *, further: bool = False) -> Call:
        """Start the SFTP server there."""
        return self._call(None, further=further)

    def by_hand(self) -> str:
        """The command with which a person reaches this host."""
        return " ".join(["ssh", *_where(self.account), self.account.host])

    def _call(self, command: str | None, *, further: bool, poll_seconds: float | None = None) -> Call:
        started = self._starter.start(command, further=further)
        patience = self.stall_seconds if poll_seconds is None else poll_seconds
        link = SocketLink(started.stream, patience, self._pace, polled=poll_seconds is not None)
        return Call(started.process, link, started.errors)


def _where(account: Account) -> list[str]:
    config = ["-F", str(account.config)] if account.config else []
    return [*config, *(["-p", str(account.port)] if account.port else [])]


class OwnSsh:
    """The ssh program of this host, as whoever called sudo."""

    def __init__(self, account: Account) -> None:
        """Raises MachineLacks where there is none."""
        program = commands.find_program("ssh")
        if program is None:
            raise MachineLacks("there is no ssh program here", "install OpenSSH's client (package openssh-client)")
        self._account = account
        self._program = str(program)
        self._user = invoker.behind_sudo()
        self.ciphers = self._resolve().get("ciphers", "")
        """Those that the configuration allows for this host, AES-GCM first."""

    def start(self, command: str | None, *, further: bool, before_exec: Callable[[], None] | None = None) -> Started:
        """Start it with a command there, or the SFTP server there (None). Raises LinkLost."""
        there = ["-s", "--", self._account.host, "sftp"] if command is None else ["--", self._account.host, command]
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        for end in (ours, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
        stderr, sink = os.pipe()
        try:
            child = commands.start(
                [self._program, *self._options(further=further), *there],
                stdin=theirs.fileno(),
                output=theirs.fileno(),
                errors=sink,
                identity=self._user,
                extra_environment=self._agent(),
                before_exec=before_exec,
                # ssh asks its questions on the terminal, which only a process of the foreground may read.
                own_group=further or not self._account.may_ask,
            )
        except OSError as error:
            ours.close()
            os.close(stderr)
            raise LinkLost(f"{self._program} cannot be started: {error.strerror}") from None
        finally:
            theirs.close()
            os.close(sink)
        return Started(child, ours, stderr, child.pid)

    def _options(self, *, further: bool) -> list[str]:
        silent = further or not self._account.may_ask
        wanted = [*ALWAYS, *(WITHOUT_QUESTIONS if further else ["BatchMode=yes"] if silent else [])]
        if self.ciphers:
            wanted.append(f"Ciphers={self.ciphers}")
        return [*_where(self._account), "-v", "-T", "-x", "-a", *(word for one in wanted for word in ("-o", one))]

    def _agent(self) -> dict[str, str] | None:
        agent = os.environ.get("SSH_AUTH_SOCK")
        return {"SSH_AUTH_SOCK": agent} if agent and self._user is None else None

    def _resolve(self) -> dict[str, str]:
        """What ssh makes of the configuration for this host, with AES-GCM first among the ciphers it allows."""
        argv = [self._program, *_where(self._account), "-G", "--", self._account.host]
        done = commands.run(argv, timeout=RESOLVE_SECONDS, identity=self._user)
        pairs = (line.partition(" ") for line in done.stdout.splitlines())
        found = {name: value for name, _, value in pairs}
        ciphers = [name for name in found.get("ciphers", "").split(",") if name]
        found["ciphers"] = ",".join(sorted(ciphers, key=lambda name: "gcm" not in name))
        return found

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
from typing import TYPE_CHECKING

from gpuckpt.model.errors import MachineLacks
from gpuckpt.model.records import dataclass
from gpuckpt.system import commands, invoker
from gpuckpt.system.links import STALL_SECONDS, LinkLost, SocketLink

if TYPE_CHECKING:
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


class Call:
    """A running ssh: its stream, and what it says on stderr."""

    def __init__(self, child: commands.Child, link: SocketLink, stderr: int) -> None:
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

    def __init__(self, account: Account, pace: Pace | None = None, stall_seconds: float = STALL_SECONDS) -> None:
        """Raises MachineLacks where there is no ssh."""
        program = commands.find_program("ssh")
        if program is None:
            raise MachineLacks("there is no ssh program here", "install OpenSSH's client (package openssh-client)")
        self.account = account
        self._program = str(program)
        self._pace = pace
        self._stall_seconds = stall_seconds
        self._user = invoker.behind_sudo()
        self._ciphers = self._resolve().get("ciphers", "")

    def run(self, command: str, *, further: bool = False, poll_seconds: float | None = None) -> Call:
        """Start a command there, a text for the login shell. `further`: without questions, on a connection of its own.

        With `poll_seconds` reading raises Silent that often, as long as nothing comes.
        """
        arguments = [*self._options(further=further), "--", self.account.host, command]
        return self._start(arguments, further=further, poll_seconds=poll_seconds)

    def sftp(self, *, further: bool = False) -> Call:
        """Start the SFTP server there."""
        return self._start([*self._options(further=further), "-s", "--", self.account.host, "sftp"], further=further)

    def by_hand(self) -> str:
        """The command with which a person reaches this host."""
        return " ".join(["ssh", *self._where(), self.account.host])

    def _where(self) -> list[str]:
        config = ["-F", str(self.account.config)] if self.account.config else []
        return [*config, *(["-p", str(self.account.port)] if self.account.port else [])]

    def _options(self, *, further: bool) -> list[str]:
        silent = further or not self.account.may_ask
        wanted = [*ALWAYS, *(WITHOUT_QUESTIONS if further else ["BatchMode=yes"] if silent else [])]
        if self._ciphers:
            wanted.append(f"Ciphers={self._ciphers}")
        return [*self._where(), "-v", "-T", "-x", "-a", *(word for one in wanted for word in ("-o", one))]

    def _agent(self) -> dict[str, str] | None:
        agent = os.environ.get("SSH_AUTH_SOCK")
        return {"SSH_AUTH_SOCK": agent} if agent and self._user is None else None

    def _resolve(self) -> dict[str, str]:
        """What ssh makes of the configuration for this host, with AES-GCM first among the ciphers it allows."""
        argv = [self._program, *self._where(), "-G", "--", self.account.host]
        done = commands.run(argv, timeout=RESOLVE_SECONDS, identity=self._user)
        pairs = (line.partition(" ") for line in done.stdout.splitlines())
        found = {name: value for name, _, value in pairs}
        ciphers = [name for name in found.get("ciphers", "").split(",") if name]
        found["ciphers"] = ",".join(sorted(ciphers, key=lambda name: "gcm" not in name))
        return found

    def _start(self, arguments: list[str], *, further: bool, poll_seconds: float | None = None) -> Call:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        for end in (ours, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
        stderr, sink = os.pipe()
        try:
            child = commands.start(
                [self._program, *arguments],
                stdin=theirs.fileno(),
                output=theirs.fileno(),
                errors=sink,
                identity=self._user,
                extra_environment=self._agent(),
                # ssh asks its questions on the terminal, which only a process of the foreground may read.
                own_group=further or not self.account.may_ask,
            )
        except OSError as error:
            ours.close()
            os.close(stderr)
            raise LinkLost(f"{self._program} cannot be started: {error.strerror}") from None
        finally:
            theirs.close()
            os.close(sink)
        patience = self._stall_seconds if poll_seconds is None else poll_seconds
        return Call(child, SocketLink(ours, patience, self._pace, polled=poll_seconds is not None), stderr)

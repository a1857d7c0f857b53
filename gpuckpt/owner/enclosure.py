"""The namespaces that a restored tree has for itself, from the owner's side (inside: system/nsinit.py).

Everything that works on the tree goes on from outside, by the pids of this host. Who goes where when one is killed:

owner            process 1 hears the end of file and ends; the kernel ends everything in the pid namespace with it
process 1        the kernel ends everything in the pid namespace; the owner sees CRIU end by signal 9
CRIU             process 1 says so and ends
after `keep`     none of them is needed: process 1 stays until the tree's root has ended
Mounts and network have no name anywhere: they go with the last process that is in them.
"""

from __future__ import annotations

import contextlib
import errno
import json
import select
import signal
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpuckpt.model.jsonform import to_json
from gpuckpt.owner.halfbuilt import NAMESPACE, end_namespace
from gpuckpt.owner.suspension import ResumeFailed
from gpuckpt.system import commands, nsinit, procfs

if TYPE_CHECKING:
    from gpuckpt.model.facts import ProcessId
    from gpuckpt.owner.journal import Journal
    from gpuckpt.owner.messages import Enclosed

START_SECONDS = 60.0
"""For a Python to start on a busy host."""
STEP_SECONDS = 0.05
NOT_ALLOWED = "namespaces need CAP_SYS_ADMIN: run it on the host itself, or leave --isolate, --netns and --clone out"


class Enclosure:
    """Namespaces being made, and CRIU in them."""

    def __init__(self, wanted: Enclosed, root: int, journal: Journal) -> None:
        """`root`: the number of the tree's root in its own pid namespace."""
        self._wanted = wanted
        self._root = root
        self._journal = journal
        self._control, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self._buffer = b""
        self._over = False
        """Nobody is at the other end any more."""
        self.init: ProcessId | None = None
        """Process 1, where there is a pid namespace."""
        self.problem = ""
        """Why it could not be made, in words."""

    @property
    def has_own_pids(self) -> bool:
        """The pids of the dump are those in a pid namespace, and none of this host's."""
        return self._wanted.pid

    def prefix(self) -> list[str]:
        """What stands in front of a program that shall be started in there; it inherits `descriptor`."""
        return [*commands.python_file(Path(nsinit.__file__)), str(self.descriptor)]

    @property
    def descriptor(self) -> int:
        """The other end of the conversation, for the program that `prefix` starts."""
        return self._theirs.fileno()

    def enter(self, started: commands.Child) -> commands.Child | EnclosedCriu:
        """Hand over the order to what was started with `prefix`; returns what stands for CRIU from here on.

        Raises ResumeFailed where the kernel refuses.
        """
        self._theirs.close()
        self._say({**to_json(self._wanted), "root": self._root})
        if not self._wanted.pid:
            return started  # it becomes CRIU
        said = self._hear(time.monotonic() + START_SECONDS)
        started.wait(START_SECONDS)
        if said is None or "init" not in said:
            raise ResumeFailed(self.problem or "the first process of the pid namespace was killed")
        self.init = procfs.process_id(int(said["init"]))
        if self.init is None:
            raise ResumeFailed("the first process of the pid namespace was killed")
        self._journal.write(NAMESPACE, pid=self.init.pid, start_ticks=self.init.start_ticks)
        self._say({"go": True})
        return EnclosedCriu(self, self.init)

    def words(self) -> str:
        """Why it failed, where the program in there has said so."""
        with contextlib.suppress(OSError):
            while not self.problem and not self._over and self._hear(time.monotonic()) is not None:
                pass
        return self.problem

    def hear_status(self, timeout: float) -> int | None:
        """CRIU's status, -n for signal n, or None after `timeout` seconds; -9 when process 1 was killed."""
        said = self._hear(time.monotonic() + timeout)
        if said is None:
            return None
        return int(said["ended"]) if "ended" in said else 1 if "failed" in said else None

    def _say(self, words: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):  # its end is heard
            self._control.sendall(json.dumps(words).encode() + b"\n")

    def _hear(self, deadline: float) -> dict[str, Any] | None:
        while b"\n" not in self._buffer:
            left = max(0.0, deadline - time.monotonic())
            if not select.select([self._control], [], [], left)[0]:
                return None
            chunk = self._read()
            if not chunk:
                self._over = True
                return {"ended": -signal.SIGKILL}
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        said: dict[str, Any] = json.loads(line)
        if "failed" in said:
            refused = said["errno"] in (errno.EPERM, errno.EACCES)
            self.problem = f"{said['failed']}{f'; {NOT_ALLOWED}' if refused else ''}"
        return said

    def _read(self) -> bytes:
        try:
            return self._control.recv(1 << 16)
        except OSError:
            return b""

    def keep(self) -> None:
        """The tree is whole: it outlives us from here on."""
        self._say({"keep": True})

    def members(self) -> dict[int, ProcessId]:
        """Whom it holds, by their pids in there."""
        return procfs.inside(self.init) if self.init is not None else {}

    def end(self) -> list[int]:
        """End everything in there; returns the pids that are left."""
        return [] if self.init is None else end_namespace(self.init)

    def close(self) -> None:
        """Close our end: process 1 ends where it was not told to keep the tree."""
        self._control.close()
        with contextlib.suppress(OSError):
            self._theirs.close()


class EnclosedCriu:
    """CRIU as a child of process 1: what CriuRun asks of a child."""

    def __init__(self, enclosure: Enclosure, init: ProcessId) -> None:
        self._enclosure = enclosure
        self._status: int | None = None
        self.init = init

    @property
    def pid(self) -> int:
        """Process 1."""
        return self.init.pid

    def poll(self) -> int | None:
        """CRIU's status, or None while it runs."""
        return self.wait(0.0)

    def wait(self, timeout: float) -> int | None:
        """Wait at most `timeout` seconds for CRIU's end."""
        deadline = time.monotonic() + timeout
        while self._status is None:
            self._status = self._enclosure.hear_status(min(STEP_SECONDS, max(0.0, deadline - time.monotonic())))
            if time.monotonic() >= deadline:
                break
        return self._status

    def kill_group(self) -> None:
        """End CRIU, its helpers and what it has built."""
        procfs.send(self.init, signal.SIGKILL)

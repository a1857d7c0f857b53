"""One small tree through its dumps and restores, looked at from outside."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from tests import harness
from tests.faults import arena

PROGRAM = harness.PROGRAMS / "soaked.py"
SIZES = {"one": 1, "pair": 2, "tcp": 2, "stopped": 2}
LOOK_SECONDS = 20.0
"""How long a tree may take to show that it goes on: much, for the machine may be busy."""

State = Literal["advancing", "gone", "part", "frozen", "dead"]


@dataclass
class Tree:
    """A started tree. Its processes are reaped here, as any parent does, before and after each restore."""

    kind: str
    log: Path
    pids: tuple[int, ...] = ()
    _over: threading.Event = field(default_factory=threading.Event)

    @classmethod
    def start(cls, kind: str, directory: Path) -> Tree:
        """Start it as a daemon would be: own session, nothing on its standard streams."""
        tree = cls(kind, directory / "log")
        argv = [sys.executable, "-I", "-S", str(PROGRAM), kind, str(tree.log)]
        actions = [(os.POSIX_SPAWN_OPEN, number, "/dev/null", os.O_RDWR, 0) for number in range(3)]
        root = os.posix_spawn(sys.executable, argv, {}, file_actions=actions, setsid=True)
        tree.pids = (root,)
        threading.Thread(target=tree._reap, daemon=True).start()
        harness.wait_for(lambda: len(arena.children(root)) == SIZES[kind] - 1, f"the {kind} tree is whole")
        tree.pids = (root, *arena.children(root))
        assert tree.look() == "advancing", tree.describe()
        return tree

    @property
    def root(self) -> int:
        """Its root's pid, before and after every restore."""
        return self.pids[0]

    def _reap(self) -> None:
        while not self._over.wait(0.01):
            for pid in self.pids:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)

    def look(self) -> State:
        """What it is: alive and at work as a whole, gone, partly gone, held, or alive and doing nothing."""
        alive = self._alive()
        if 0 < len(alive) < len(self.pids):
            time.sleep(1)  # the rest may be about to end
            alive = self._alive()
        if not alive:
            return "gone"
        if len(alive) < len(self.pids):
            return "part"
        if self._rises() and not self._held() and self._child_wakes():
            return "advancing"
        return "frozen" if self._held() else "dead"

    def _alive(self) -> list[int]:
        return [pid for pid in self.pids if harness.alive(pid)]

    def _lines(self) -> list[str]:
        return self.log.read_text().splitlines() if self.log.exists() else []

    def _rises(self) -> bool:
        """Three more numbers are written, each one above the last."""
        before = len(self._lines())

        def fresh() -> list[int]:
            return [int(line) for line in self._lines()[before:] if line.isdigit()]

        if not _within(LOOK_SECONDS, lambda: len(fresh()) >= 4):
            return False
        numbers = fresh()[1:]
        return numbers == list(range(numbers[0], numbers[0] + len(numbers)))

    def _held(self) -> bool:
        """A process is stopped or traced that should not be, or one runs that should stand still."""
        return not _within(2, lambda: all(self._stands_right(number, pid) for number, pid in enumerate(self.pids)))

    def _stands_right(self, number: int, pid: int) -> bool:
        try:
            status = Path(f"/proc/{pid}/status").read_text()
        except OSError:
            return False
        letter = harness.state(pid)
        stands = letter == "T" if self.kind == "stopped" and number == 1 else letter not in ("T", "t")
        return stands and "TracerPid:\t0\n" in status

    def _child_wakes(self) -> bool:
        """The child that stands still writes a line when it is woken, and stands still again."""
        if self.kind != "stopped":
            return True
        before = self._lines().count("WOKE")
        os.kill(self.pids[1], signal.SIGCONT)
        woke = _within(LOOK_SECONDS, lambda: self._lines().count("WOKE") == before + 1)
        return woke and _within(LOOK_SECONDS, lambda: harness.state(self.pids[1]) == "T")

    def describe(self) -> str:
        """What /proc says of each process."""
        return "\n".join(_card(pid) for pid in self.pids)

    def kill(self) -> None:
        """End it, and wait until its pids are free."""
        for pid in self.pids:
            arena.kill(pid)
        harness.wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in self.pids), "the tree is gone", 30)

    def end(self) -> None:
        """End it for good."""
        self.kill()
        self._over.set()


def _within(seconds: float, condition) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.01)
    return bool(condition())


def _card(pid: int) -> str:
    """Command, state, tracer and kernel stack of a process."""
    parts = [f"== {pid}: {arena.command_of(pid)}"]
    for name in ("status", "wchan", "stack", "cgroup"):
        with contextlib.suppress(OSError):
            parts.append(Path(f"/proc/{pid}/{name}").read_text())
    return "\n".join(parts)

"""One run of CRIU as the owner's child: started, awaited at the gate, let pass or turned away."""

from __future__ import annotations

import contextlib
import os
import resource
import select
import signal
import time
from typing import TYPE_CHECKING

from gpuckpt.model.records import dataclass
from gpuckpt.owner.enclosure import EnclosedCriu
from gpuckpt.owner.messages import Channel, PeerGone
from gpuckpt.system import commands, criu_log, procfs

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from gpuckpt.owner.enclosure import Enclosure
    from gpuckpt.owner.gate import Gate
    from gpuckpt.owner.journal import Journal
    from gpuckpt.system.criu import WorkPaths

OPEN_FILES = 1 << 20
"""RLIMIT_NOFILE for CRIU: it opens a descriptor for nearly every one of the tree's."""

STEP_SECONDS = 0.2

SILENCE_SECONDS = 30.0
"""A main that has not said anything for so long (it does every 2 s) was stopped: the job must not stand with it."""

STALL_SECONDS = 120.0
"""No new log line and no byte read for so long is no work any more."""


class Aborted(Exception):
    """Main said abort, or has ended, while CRIU was at work."""


class MainSilent(Aborted):
    """Main lives but has not said anything for SILENCE_SECONDS: somebody stopped it."""


class Expired(Exception):
    """The deadline of the whole operation has passed."""


@dataclass(frozen=True, slots=True)
class CriuFailure(Exception):
    """CRIU ended with something else than success; the words are for the user."""

    cause: str
    remedy: str
    line: str
    known: bool


class CriuRun:
    """A started CRIU.

    With `shielded` (a dump) only SIGKILL can end it from outside, for a CRIU that dies can take the job along:
    while it puts its code in (2 of 100 random kills), and from then on until it has let go of it where there
    are TCP connections, which it leaves in repair mode (13 of 60).
    """

    def __init__(
        self,
        argv: Sequence[str],
        paths: WorkPaths,
        gate: Gate,
        journal: Journal,
        *,
        stdin: int | None = None,
        pass_fds: Sequence[int] = (),
        before_exec: Callable[[], None] | None = None,
        new_session: bool = False,
        shielded: bool = False,
        enclosure: Enclosure | None = None,
    ) -> None:
        self._paths = paths
        self._enclosure = enclosure
        self._shielded = shielded
        self._gate = gate
        self._output = os.open(paths.work / "criu.output", os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        journal.write("criu", argv=list(argv))
        self._child: commands.Child | EnclosedCriu = commands.start(
            argv,
            extra_environment={"GPUCKPT_GATE": str(gate.address)},
            cwd="/",
            stdin=stdin,
            output=self._output,
            pass_fds=pass_fds,
            before_exec=lambda: _prepare_child(before_exec, shielded=shielded),
            new_session=new_session,
        )
        if enclosure is not None:
            self._child = enclosure.enter(self._child)
        if isinstance(self._child, EnclosedCriu):
            return  # the journal has process 1, whose end is CRIU's
        identity = procfs.process_id(self._child.pid)
        journal.write("criu-started", pid=self._child.pid, start_ticks=identity.start_ticks if identity else 0)

    @property
    def pid(self) -> int:
        """CRIU's process id and process group."""
        return self._child.pid

    def await_gate(self, main: Channel, deadline: float | None, *, stalled_pids: Sequence[int] = ()) -> None:
        """Wait until CRIU stands at the gate.

        Raises CriuFailure when it ended instead, Aborted when main said so or is gone, Expired after the
        deadline, or when neither CRIU's log nor what CRIU and `stalled_pids` read grows any more, and main
        does not say `progress` either: a restore from images that do not fit can wait, or spin, for ever.
        """
        watchdog, began = Watchdog(self._paths.log, self._pids(stalled_pids)), time.monotonic()
        while not self._gate.has_caller:
            ready, _, _ = select.select([self._gate.fileno(), main.fileno()], [], [], STEP_SECONDS)
            if self._gate.fileno() in ready:
                self._gate.accept()
            elif main.fileno() in ready:
                if raise_if_aborted(main) == "progress":
                    watchdog.note_progress()
            elif self._child.poll() is not None:
                raise self.failure()
            if main.silent_seconds(began) > SILENCE_SECONDS:
                raise MainSilent
            if watchdog.has_stalled() or (deadline is not None and time.monotonic() > deadline):
                raise Expired

    def _pids(self, those: Sequence[int]) -> Callable[[], Sequence[int]]:
        """CRIU, and `those` as far as they are pids of this host."""
        child = self._child
        if isinstance(child, EnclosedCriu):
            return lambda: [one.pid for one in procfs.inside(child.init).values()]
        return lambda: (child.pid, *those)

    def await_end(self, timeout: float) -> int | None:
        """CRIU's status after it passed the gate, or None when it did not end in time."""
        return self._child.wait(timeout)

    def turn_away(self, timeout: float) -> int | None:
        """Abort at the gate and wait until CRIU has undone its work; kill it when it does not end.

        None when it had to be killed. Helpers that a CRIU which failed has left in its group end too.
        """
        if self._shielded and not self._gate.has_caller:
            choke(self._child.pid)
        self._gate.close()
        status = self._child.wait(timeout)
        if status != 0:
            self.kill()
        return status

    def kill(self) -> None:
        """SIGKILL CRIU and its helpers: the last resort, for the job may not survive it."""
        self._child.kill_group()
        self._child.wait(5.0)

    def failure(self) -> CriuFailure:
        """Why CRIU failed, read from its log."""
        status = self._child.poll()
        words = self._enclosure.words() if self._enclosure is not None else ""
        if words:
            return CriuFailure(words, "", "", known=True)
        said = os.pread(self._output, 65536, 0).decode("utf-8", "replace")
        why = criu_log.explain(self.log_text(), said, "", status if status is not None else -9)
        return CriuFailure(why.cause, why.remedy, why.line, why.known)

    def log_text(self) -> str:
        """CRIU's log so far."""
        try:
            return self._paths.log.read_text("utf-8", "replace")
        except OSError:
            return ""

    def close(self) -> None:
        """Close the file that holds its output."""
        os.close(self._output)


class Watchdog:
    """Notices that CRIU makes no progress. CPU time proves nothing: one known hang spins."""

    def __init__(self, log: Path, pids: Callable[[], Sequence[int]]) -> None:
        self._log = log
        self._pids = pids
        self._seen: tuple[int, ...] = ()
        self._since = time.monotonic()

    def note_progress(self) -> None:
        """Somebody else has seen progress: pages that CRIU splices are in no counter of its own."""
        self._since = time.monotonic()

    def has_stalled(self) -> bool:
        """Whether nothing has grown for STALL_SECONDS."""
        size = self._log.stat().st_size if self._log.exists() else 0
        now = (size, *(procfs.io_bytes(pid) or 0 for pid in self._pids()))
        if now != self._seen:
            self._seen, self._since = now, time.monotonic()
        return time.monotonic() - self._since > STALL_SECONDS


def raise_if_aborted(main: Channel) -> str | None:
    """Read one message: abort and the end of file stop the work; any other word is returned."""
    try:
        message = main.receive(0)
    except PeerGone:
        raise Aborted from None
    word = str(message["say"]) if message is not None else None
    if word == "abort":
        raise Aborted
    return word


def stop_if_aborted(main: Channel) -> None:
    """Between two long steps: raises Aborted when main has said so meanwhile, or is gone."""
    while raise_if_aborted(main) is not None:
        pass


def choke(pid: int) -> None:
    """Let every write of this CRIU fail from now on, as on a full disk: it gives up by itself, at once and cleanly.

    No signal can do that: see CriuRun. Waiting for it to come to the gate would hold a large job for minutes.
    """
    with contextlib.suppress(OSError, ValueError):
        _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, hard))


def _prepare_child(further: Callable[[], None] | None, *, shielded: bool) -> None:
    """A restore's CRIU is ordinary again where the owner is not: open to signals and to the OOM killer.

    A dump's CRIU is as well protected as the owner. SIGXFSZ is what `choke` would otherwise kill it with.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN if shielded else signal.SIG_DFL)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN if shielded else signal.SIG_DFL)
    if not shielded:
        procfs.set_own_oom_score_adj(0)
    if further is not None:
        further()

"""One migration between two hosts during which something is killed: who is hit, when, and where the job is afterwards."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tests import harness
from tests.faults import arena
from tests.faults.arena import HERE
from tests.harness import wait_for
from tests.twohosts import Host, TwoHosts

STEPS = ("hello", "judged", "capturing", "transferring", "preparing", "prepared", "given", "go sent", "running")
TARGETS = ("far serve", "far owner", "source main", "source owner", "source both", "source criu", "ssh", "sshd")
FIRST = {
    "far owner": "transferring",
    "source owner": "capturing",
    "source both": "capturing",
    "source criu": "given",
}
"""From which step on there is somebody to kill; a CRIU that is killed before takes a job with connections along."""

CELLS = tuple(
    (target, step)
    for target in TARGETS
    for step in STEPS
    if STEPS.index(step) >= STEPS.index(FIRST.get(target, STEPS[0]))
)
PACE = ("--settle", 1.0, "--bwlimit", "20M")
MEGABYTES = 12


@dataclass
class Outcome:
    """What a cell ended with."""

    target: str
    step: str
    hit: bool
    status: int | None
    here: str
    """Of the job on the source: runs, held, none, or odd."""
    there: str
    words: str = ""
    resumed: str = ""
    """What the source was after `gpuckpt restore --tree`, where it was held and nothing ran there."""

    @property
    def right(self) -> bool:
        """Exactly one running copy; or one held that a person decides about, and brings back with one command."""
        if (self.here, self.there).count("runs") == 1:
            return "odd" not in (self.here, self.there) and self._truthful
        return (self.here, self.there, self.resumed) == ("held", "none", "runs") and self.status in (51, 41, 31, None)

    @property
    def _truthful(self) -> bool:
        if self.there == "runs":
            return self.status in (0, None) if self.here == "none" else self.status in (51, None)
        return self.status not in (0, 51, 41)

    def row(self) -> str:
        """A line of the table."""
        where = f"{self.here} here, {self.there} there" + (f", then {self.resumed} here" if self.resumed else "")
        hit = "" if self.hit else " (ended before)"
        status = "killed" if self.status is None else self.status
        return f"| {self.target} | {self.step}{hit} | {status} | {where} | {'' if self.right else 'WRONG'} |"


@dataclass
class Crossing:
    """A migration of a fresh job from a to b."""

    hosts: TwoHosts
    number: int
    pids: list[int] = field(default_factory=list)
    events: list[dict] = field(default_factory=list)
    _said: list[str] = field(default_factory=list)
    _before: set[str] = field(default_factory=set)

    @property
    def log(self) -> str:
        """The job's, by its name on either host."""
        return f"/srv/log-{self.number}"

    def start(self) -> None:
        """Start the job, and send it away."""
        a = self.hosts.a
        self._before = {one.name for host in self.hosts.hosts for one in self._runs(host)}
        program = [sys.executable, "-E", "-S", HERE / "paired_counter.py", self.log, MEGABYTES]
        root = a.daemon(*program)
        harness.wait_for_count(a.outside(self.log), 3)
        self.pids = [root, int(a.run("cat", f"/proc/{root}/task/{root}/children").stdout)]
        self.main = a.start_gpuckpt("migrate", "--tree", root, "b", *self.hosts.reach, *PACE)
        self.main_pid = self.hosts.a.pid_of(self.main)
        for act in (self._listen, lambda: self._said.append(self.main.stdout.read())):
            threading.Thread(target=act, daemon=True).start()

    def _listen(self) -> None:
        for line in self.main.stderr:
            if line.startswith("{"):
                self.events.append(json.loads(line))

    def has(self, phase: str, state: str = "begin", job_is_on: str | None = None) -> bool:
        """Whether main has told of this."""
        return any(
            (one["event"], one["state"]) == (phase, state) and job_is_on in (None, one.get("job_is_on"))
            for one in self.events
        )

    def _runs(self, host: Host) -> list[Path]:
        """The directories of this crossing's runs; what a killed one before it left is settled later."""
        found = Path(f"/proc/{host.init}/root/run/gpuckpt/runs").glob("*")
        return [one for one in found if one.name not in self._before]

    def journal_has(self, host: Host, act: str) -> bool:
        """Whether a run on this host has written this act down."""
        return any(f'"act": "{act}"' in _text(one / "journal") for one in self._runs(host))

    def reached(self, step: str) -> Callable[[], bool]:
        """Tells whether a step has come."""
        a, b = self.hosts.a, self.hosts.b
        return {
            "hello": lambda: bool(b.serving()),
            "judged": lambda: bool(self._runs(a)),
            "capturing": lambda: self.journal_has(a, "criu-started"),
            "transferring": lambda: self.has("transfer"),
            "preparing": lambda: self.has("prepare"),
            "prepared": lambda: self.journal_has(b, "prepared"),
            "given": lambda: self.journal_has(a, "given"),
            "go sent": lambda: self.has("job", "note", "unknown"),
            "running": lambda: self.has("job", "note", "b"),
        }[step]

    def until(self, step: str) -> bool:
        """Wait for a step; False when main ended before it came."""
        reached = self.reached(step)
        while harness.alive(self.main_pid):
            if reached():
                return True
            time.sleep(0.002)
        return False

    def of(self, target: str) -> list[int]:
        """The processes that are meant, by their pids outside."""
        a, b = self.hosts.a, self.hosts.b
        source_owner = [pid for pid in (arena.owner_of(self.main_pid),) if pid]
        return {
            "far serve": b.serving,
            "far owner": lambda: [owner for pid in b.serving() if (owner := arena.owner_of(pid))],
            "source main": lambda: [self.main_pid],
            "source owner": lambda: source_owner,
            "source both": lambda: [self.main_pid, *source_owner],
            "source criu": lambda: [criu for owner in source_owner if (criu := arena.criu_of(owner))],
            "ssh": lambda: [pid for pid, argv in a._processes() if argv[0].rpartition(b"/")[2] == b"ssh"],
            "sshd": lambda: [pid for pid, argv in b._processes() if b"sshd" in argv[0]],
        }[target]()

    def wait_quiet(self) -> None:
        """Until every gpuckpt and CRIU on both hosts has ended."""

        def busy() -> list[list[bytes]]:
            return [
                argv
                for host in (self.hosts.a, self.hosts.b)
                for _, argv in host._processes()
                if any(word in b" ".join(argv) for word in (b"-m gpuckpt", b"gpuckpt.owner", b"--action-script"))
            ]

        wait_for(lambda: not busy(), f"all of gpuckpt ends: {busy()}", 150)

    def state(self, host: Host) -> str:
        """What the job is there: runs, held, none, or a mixture."""
        letters = self._letters(host)
        if letters == {"-"}:
            return "none"
        if letters <= {"T", "t"}:
            return "held"
        return "odd" if letters & {"-", "T", "t"} or not self._counts(host) else "runs"

    def _letters(self, host: Host) -> set[str]:
        seen = [
            host.run("cat", f"/proc/{pid}/stat", check=False).stdout.rpartition(")")[2].split() for pid in self.pids
        ]
        return {one[0] if one and one[0] not in "ZX" else "-" for one in seen}

    def _counts(self, host: Host) -> bool:
        log = host.outside(self.log)
        before = harness.numbers(log)[-1]
        wait_for(lambda: harness.numbers(log)[-1] > before + 2, f"the job on {host.name} counts")
        harness.assert_gapless(log)
        return True

    def answer(self) -> tuple[int | None, str]:
        """Main's status and words; None where it was killed."""

        def ended() -> bool:
            _continue([self.main.pid])  # nsenter stops with its child, but may do so after that went on
            return self.main.poll() is not None

        wait_for(ended, "main ends", 150)
        wait_for(lambda: self._said, "main's words")
        if not self._said[0]:
            return None, ""
        return self.main.returncode, str(json.loads(self._said[0])["error"])

    def end(self) -> None:
        """Leave nothing of the job on either host, whatever went wrong."""
        arena.kill(self.main_pid)
        self.main.kill()
        self.main.wait(30)
        for host in (self.hosts.a, self.hosts.b):
            host.run("sh", "-c", f"kill -KILL {' '.join(map(str, self.pids))}", check=False)
            wait_for(lambda host=host: self._letters(host) == {"-"}, "the job ends")
            host.outside(self.log).unlink(missing_ok=True)
        for pipe in (self.main.stdout, self.main.stderr):
            pipe.close()


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def cross(hosts: TwoHosts, number: int, target: str, step: str) -> Outcome:
    """One cell of the matrix."""
    crossing = Crossing(hosts, number)
    crossing.start()
    try:
        hit = _strike(crossing, target, step)
        status, words = crossing.answer()
        crossing.wait_quiet()
        outcome = Outcome(target, step, hit, status, crossing.state(hosts.a), crossing.state(hosts.b), words)
        if (outcome.here, outcome.there) == ("held", "none"):
            _resume(crossing, outcome)
        return outcome
    finally:
        crossing.end()


def _resume(crossing: Crossing, outcome: Outcome) -> None:
    a, root = crossing.hosts.a, crossing.pids[0]
    looked = a.gpuckpt("inspect", "--tree", root)
    assert looked.report["data"]["interrupted"]["given_to"] == "b", looked.report["data"]["interrupted"]
    done = a.gpuckpt("restore", "--tree", root)
    assert done.status == 0, (done.error, done.stderr)
    outcome.resumed = crossing.state(a)


def _strike(crossing: Crossing, target: str, step: str) -> bool:
    """Kill at a step. Where a step is a matter of microseconds, somebody else is stopped in it."""
    stopped: list[int] = []
    if step in ("prepared", "go sent"):
        # Main cannot go on from `prepared`, nor the copy's owner from `go`, while they are stopped.
        hit = crossing.until("preparing")
        # It says so before it asks: the owner there has its order once it has asked.
        wait_for(lambda: not hit or crossing.journal_has(crossing.hosts.b, "order"), "the other host was asked")
        stopped = _stop([crossing.main_pid]) if hit else []
        wait_for(lambda: crossing.journal_has(crossing.hosts.b, "prepared"), "the copy stands ready")
        if step == "go sent":
            owner = crossing.of("far owner")
            # It sleeps when it has said `prepared`, which stands in its journal before that.
            wait_for(lambda: harness.state(owner[0]) == "S", "the copy's owner waits for `go`")
            _stop(owner)
            _continue(stopped)
            stopped = owner
            hit = crossing.until("go sent")
            time.sleep(0.2)
    else:
        hit = crossing.until(step)
    killed = [arena.kill(pid) for pid in crossing.of(target)] if hit else []
    if target == "sshd":
        _start_sshd_again(crossing.hosts.b, wait=step == "go sent")
    _continue(stopped)
    return any(killed)


def _start_sshd_again(host: Host, *, wait: bool) -> None:
    """At once; or, to leave a `go` without an answer, when nobody asks any more."""

    def start() -> None:
        time.sleep(60 if wait else 0.5)
        config = host.directory / "sshd_config"
        host.start("/usr/sbin/sshd", "-f", config, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).wait(60)

    threading.Thread(target=start).start()


def _stop(pids: list[int]) -> list[int]:
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    return pids


def _continue(pids: list[int]) -> None:
    for pid in pids:
        try:
            os.kill(pid, signal.SIGCONT)
        except ProcessLookupError:
            continue

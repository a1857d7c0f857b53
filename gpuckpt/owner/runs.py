"""Runs: who works on which tree right now, and what an interrupted run has left.

Every run that may touch a tree has a directory below /run/gpuckpt/runs with a lock that main and owner
both hold. Overlapping trees are busy, refused and not queued. An unlocked directory belongs to a run
whose processes have all ended.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpuckpt.model.errors import Busy, MachineLacks
from gpuckpt.model.facts import ProcessId
from gpuckpt.model.records import dataclass
from gpuckpt.owner import gate, halfbuilt, networklock
from gpuckpt.owner import journal as journals
from gpuckpt.system import filechanges, procfs
from gpuckpt.system.files import placed_from

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

RUNTIME = Path("/run/gpuckpt")
PRIVATE = 0o700
KEPT_FAILURES = 20
WAIT_STEP_SECONDS = 0.1
SETTLE_SECONDS = 5.0
"""How long a run waits for another's restore before it leaves to a later one what an ended run did to files."""
ROOM_BYTES = 16 << 20
ROOM_FILES = 64
"""What a run writes into /run: journal, lock, CRIU's log."""
CRIU_LOG = "criu.log"
"""CRIU's log, in the directory of its run."""
FETCHED = "fetched"
"""A link in the directory of a restore: to what was fetched of an image on another host."""
CARD = "run.json"
"""Who works on which processes since when, in the directory of a run."""
SECRETS = "secrets"
"""A link in the directory of a run: to what is encrypted in the image and lies in clear meanwhile, in memory."""
UNTOLD = "untold"
"""In the directory of an ended run: what a person must know of it, and what nobody has been told yet."""

Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Run:
    """A run of our own: its directory and the locked descriptor that says it lives."""

    directory: Path
    lock_fd: int

    @property
    def id(self) -> str:
        """Its short name."""
        return self.directory.name

    def release(self) -> None:
        """Others may work on the tree from here on, although we stay with it (main and owner share the lock)."""
        fcntl.flock(self.lock_fd, fcntl.LOCK_UN)

    def owe(self, words: str | None) -> None:
        """What the next run must tell a person if this one is killed from here on; None: nothing any more."""
        if words is None:
            (self.directory / UNTOLD).unlink(missing_ok=True)
        else:
            # Room for it was looked for when the run began; a run is not given up for it.
            with contextlib.suppress(OSError):
                (self.directory / UNTOLD).write_text(json.dumps([words]))

    def finish(self, *, keep: bool) -> None:
        """The run is over: its directory goes, unless a later repair will need it."""
        if not keep:
            remove(self.directory)
        os.close(self.lock_fd)

    def keep_log(self, log: Path) -> Path | None:
        """Keep a log of a failed run where the person can read it; older ones go."""
        if not log.exists():
            return None
        directory = make_runtime("failed")
        kept = directory / f"{self.id}-{log.name}"
        shutil.copyfile(log, kept)
        for old in sorted(directory.iterdir(), key=lambda path: path.stat().st_mtime)[:-KEPT_FAILURES]:
            old.unlink(missing_ok=True)
        return kept


@dataclass(frozen=True, slots=True)
class Leftover:
    """A run that was killed while it held a tree of which something still lives."""

    directory: Path
    operation: str
    since: float
    ids: tuple[ProcessId, ...]

    @property
    def given_to(self) -> str | None:
        """The host to which a migration gave the tree, where it may run by now."""
        given = journals.read(self.directory).last("given")
        return str(given["to"]) if given is not None else None


def begin(
    operation: str, ids: Sequence[ProcessId], *, repairs: Leftover | None = None, tell: Tell | None = None
) -> Run:
    """Start a run on these processes; `tell` hears what was found when ended runs were settled on the way.

    Raises Busy when another run works on one of them, or left one of them held (unless this run
    repairs it), MachineLacks when /run cannot be written.
    """
    with _mutex():
        _refuse_overlap(ids, tell=tell, repairs=repairs)
        return _create(operation, ids)


def follow(run: Run, ids: Sequence[ProcessId]) -> None:
    """A run that has not touched its tree yet goes by what the tree is now. Raises as `begin`."""
    with _mutex():
        _refuse_overlap(ids, own=run.directory)
        card = {**_read_card(run.directory), "ids": _listed(ids)}
        (run.directory / "run.new").write_text(json.dumps(card))
        (run.directory / "run.new").replace(run.directory / CARD)


def _refuse_overlap(
    ids: Sequence[ProcessId], *, own: Path | None = None, repairs: Leftover | None = None, tell: Tell | None = None
) -> None:
    for other in _others(tell=tell):
        if other.directory == own or not {one.pid for one in other.ids} & {one.pid for one in ids}:
            continue
        if other.locked:
            raise _busy(other)
        if repairs is None or other.directory != repairs.directory:
            raise _left_held(other)


def refuse_busy(ids: Sequence[ProcessId]) -> None:
    """Raise Busy when another run is at work on one of these pids; only looks, and may be too early: see `begin`.

    Asked first, for a tree under another gpuckpt looks odd in every other way: traced, stopped, half there.
    """
    pids = {one.pid for one in ids}
    for other in _others(tidy=False):
        if other.locked and pids & {one.pid for one in other.ids}:
            raise _busy(other)


def leftovers_of(ids: Sequence[ProcessId], tell: Tell | None = None) -> list[Leftover]:
    """What interrupted runs have left of these processes. Known by pid: a restore gives them new start times.

    `tell` as in `begin`. Raises MachineLacks when /run cannot be written.
    """
    pids = {one.pid for one in ids}
    with _mutex():
        unlocked = [other for other in _others(tell=tell) if not other.locked]
    return [_leftover(other) for other in unlocked if pids & {one.pid for one in other.ids}]


def leftover_of(root: ProcessId) -> Leftover | None:
    """What an interrupted run left of this process, for those who only look: nothing is locked or removed."""
    found = (_leftover(other) for other in _others(tidy=False) if not other.locked)
    return next((one for one in found if root.pid in {identity.pid for identity in one.ids}), None)


def _leftover(other: _Other) -> Leftover:
    return Leftover(other.directory, other.operation, other.since, other.ids)


@dataclass(frozen=True, slots=True)
class _Other:
    directory: Path
    operation: str
    pid: int
    since: float
    ids: tuple[ProcessId, ...]
    locked: bool


def _run_directories() -> list[Path]:
    """None for those who may not look: they are refused for that by the checks."""
    try:
        return sorted((RUNTIME / "runs").iterdir())
    except (FileNotFoundError, PermissionError):
        return []


def _others(*, tidy: bool = True, tell: Tell | None = None) -> Iterator[_Other]:
    """All other runs that matter; those whose trees have ended are removed on the way (under the mutex only)."""
    for directory in _run_directories():
        said = _read_card(directory)
        locked = is_locked(directory / "lock")
        ids = tuple(ProcessId(pid, ticks) for pid, ticks in said.get("ids", ()))
        if not locked and not _matters(directory, said.get("operation", ""), ids):
            if tidy:
                settle(directory, tell)
            continue
        yield _Other(directory, said.get("operation", "?"), said.get("pid", 0), said.get("since", 0.0), ids, locked)


def _matters(directory: Path, operation: str, ids: tuple[ProcessId, ...]) -> bool:
    """Whether an ended run may have left something held. A run without an order never touched anything."""
    past = journals.read(directory)
    if not past.has("order") or halfbuilt.is_enclosed(past):
        return False  # what is half-built ends by itself with its owner, or is ended when the run is settled
    if criu_at_work(past):
        return True
    if operation == "restore":
        # Its processes were born by it: their start times are not those of the dump.
        log = directory / CRIU_LOG
        half_built = not came_alive(directory)
        pids = [one.pid for one in ids]
        return half_built and bool(halfbuilt.own_processes(log, pids, born_after=began(past), long_ago=True))
    unwound = past.last("unwound")
    if unwound is not None and unwound.get("state") == "running":
        return False
    return any(procfs.state(one) not in procfs.ENDED for one in ids)


def came_alive(directory: Path) -> bool:
    """Whether the tree of a restore was let go, whole: it may have worked since, and have ended by itself."""
    return journals.read(directory).has("let-go") and halfbuilt.came_alive(directory / CRIU_LOG)


def began(past: journals.PastRun) -> int:
    """When the owner of a run was started, in clock ticks since boot."""
    line = past.last("owner-started")
    return int(line["start_ticks"]) if line else 0


def criu_at_work(past: journals.PastRun) -> bool:
    """Whether the CRIU of a run whose owner was killed is still there, undoing its work."""
    line = past.last("criu-started")
    if line is None:
        return False
    return procfs.state(ProcessId(int(line["pid"]), int(line["start_ticks"]))) not in procfs.ENDED


def remove(directory: Path) -> None:
    """Remove a run's directory, gate script and network lock, and the files made for it, which may lie elsewhere."""
    gate.remove_script(directory)
    networklock.let_through(directory)
    for link in (directory / "images", directory / FETCHED, directory / SECRETS):
        if link.is_symlink():
            shutil.rmtree(link.readlink(), ignore_errors=True)
    shutil.rmtree(directory, ignore_errors=True)


def let_packets_through() -> None:
    """Packets that only runs that were killed still hold back pass again, also where their trees are held."""
    for directory in _run_directories():
        if networklock.is_held_back(directory) and not is_locked(directory / "lock"):
            networklock.let_through(directory)


def remove_if_settled(directory: Path) -> None:
    """Remove a run's own directory when nothing of its tree is held: for an owner whose main was killed."""
    said = _read_card(directory)
    ids = tuple(ProcessId(pid, ticks) for pid, ticks in said.get("ids", ()))
    if said and not _matters(directory, said.get("operation", ""), ids):
        settle(directory, None)


def settle(directory: Path, tell: Tell | None) -> None:
    """Put right what an ended run that holds nothing has left outside its directory, and remove that.

    `tell` hears what could not be put right. Without it (an owner whose main was killed) the words stay in the
    directory, and the next run tells them. The directory stays as well while another restore puts files in place.
    """
    networklock.let_through(directory)
    _remove_litter(directory)
    _end_half_built(directory)
    try:
        words = [*_untold(directory), *_take_files_back(directory)]
    except TimeoutError:
        return
    if words and tell is None:
        (directory / UNTOLD).write_text(json.dumps(words))
        return
    remove(directory)
    if tell is not None:
        for word in words:
            tell(word)


def _end_half_built(directory: Path) -> None:
    """A tree in a pid namespace of its own stands in nobody's way: no other restore would ask for its end."""
    init = halfbuilt.init_of(journals.read(directory))
    if init is not None and not came_alive(directory):
        halfbuilt.end_namespace(init)


def _untold(directory: Path) -> list[str]:
    try:
        words = json.loads((directory / UNTOLD).read_text())
    except (OSError, ValueError):
        return []
    return [str(word) for word in words] if isinstance(words, list) else []


def _take_files_back(directory: Path) -> list[str]:
    """A restore whose tree never came alive has changed no file; returns what could not be taken back, in words.

    Raises TimeoutError where another restore puts files in place, which may be the same.
    """
    if came_alive(directory) or not (directory / filechanges.JOURNAL).exists():
        return []
    deadline = time.monotonic() + SETTLE_SECONDS

    def be_patient() -> None:
        if time.monotonic() > deadline:
            raise TimeoutError

    lock = alone_with_captured_files(be_patient)
    try:
        return [f"an interrupted restore was taken back, but {word}" for word in filechanges.undo(directory)]
    finally:
        os.close(lock)


def _remove_litter(directory: Path) -> None:
    """What CRIU left of a tree that a dump has ended, where main and owner were killed before they removed it."""
    past = journals.read(directory)
    committed = past.last("committed")
    if committed is not None and not past.has("unwound"):
        for one in placed_from(committed.get("litter")):
            one.remove()


def _read_card(directory: Path) -> dict[str, Any]:
    try:
        said = json.loads((directory / CARD).read_text())
    except (OSError, ValueError):
        return {}
    return said if isinstance(said, dict) else {}


def is_locked(path: Path) -> bool:
    """Whether a process of the run with this lock file lives."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def _busy(other: _Other) -> Busy:
    since = time.strftime("%H:%M:%S", time.localtime(other.since))
    return Busy(
        f"gpuckpt {other.operation} (pid {other.pid}) has been working on this tree since {since}",
        "wait for it to end, then try again",
    )


def _left_held(other: _Other) -> Busy:
    root = other.ids[0].pid if other.ids else 0
    return Busy(
        f"an interrupted gpuckpt {other.operation} may have left this tree held",
        f"run `gpuckpt restore --tree {root}` to repair it",
    )


def _create(operation: str, ids: Sequence[ProcessId]) -> Run:
    room = os.statvfs(RUNTIME)
    if room.f_bavail * room.f_frsize < ROOM_BYTES or (room.f_files and room.f_favail < ROOM_FILES):
        raise MachineLacks(
            f"the file system of {RUNTIME} is full: the journal and CRIU's log would not fit",
            "make room there, at least 16 MiB",
        )
    directory = RUNTIME / "runs" / os.urandom(4).hex()
    directory.mkdir(mode=0o700)
    descriptor = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    card = {
        "operation": operation,
        "pid": os.getpid(),
        "since": time.time(),
        "ids": _listed(ids),
    }
    (directory / CARD).write_text(json.dumps(card))
    return Run(directory, descriptor)


def _listed(ids: Sequence[ProcessId]) -> list[list[int]]:
    return [[one.pid, one.start_ticks] for one in ids]


def make_runtime(name: str) -> Path:
    """A directory below /run/gpuckpt; nobody but root can look into either, whatever the umask. Raises OSError."""
    directory = RUNTIME / name
    for place in (RUNTIME, directory):
        try:
            place.mkdir(mode=0o700)
        except FileExistsError:
            if stat.S_IMODE(place.stat().st_mode) == PRIVATE:
                continue
        place.chmod(PRIVATE)
    return directory


def alone_with_captured_files(going_on: Callable[[], None]) -> int:
    """Lock out other restores that put captured files in place; the descriptor is the lock.

    `going_on` is called while we wait, and may raise. Raises OSError.
    """
    descriptor = os.open(RUNTIME / "captured.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                going_on()
                time.sleep(WAIT_STEP_SECONDS)
            else:
                return descriptor
    except BaseException:
        os.close(descriptor)
        raise


@contextlib.contextmanager
def _mutex() -> Iterator[None]:
    """One run at a time looks and enters."""
    try:
        make_runtime("runs")
        descriptor = os.open(RUNTIME / "mutex", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise MachineLacks(f"{RUNTIME} cannot be written: {error.strerror}", "run as root") from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)

"""What main and owner say to each other: JSON lines over a socket pair; an end of file is a message too."""

from __future__ import annotations

import json
import select
import threading
import time
from dataclasses import field
from typing import TYPE_CHECKING, Any, Literal

from gpuckpt.model.facts import GpuDriver, ProcessId
from gpuckpt.model.jsonform import from_json, to_json
from gpuckpt.model.manifest import CriuOptions
from gpuckpt.model.records import dataclass

if TYPE_CHECKING:
    import socket

MAX_LINE_BYTES = 64 << 20


class PeerGone(Exception):
    """The other process has ended: its end of the socket is closed."""


@dataclass(frozen=True, slots=True)
class CudaMember:
    """One CUDA process of the tree and what its resume will need."""

    id: ProcessId
    restore_tid: int
    memory_bytes: dict[str, int] = field(default_factory=dict)
    """GPU UUID -> bytes it needs there; empty when unknown."""


@dataclass(frozen=True, slots=True)
class TreeOrder:
    """The tree an order is about."""

    root: ProcessId
    ids: tuple[ProcessId, ...]
    stopped: tuple[ProcessId, ...] = ()
    """Found stopped by a signal before we came: they stay stopped."""
    cuda: tuple[CudaMember, ...] = ()


@dataclass(frozen=True, slots=True)
class DumpOrder:
    """Suspend the tree, let CRIU dump it, and wait at the gate for commit or abort."""

    run_directory: str
    tree: TreeOrder
    criu: str
    images: str
    options: CriuOptions
    leave_running: bool
    keep_network_lock: bool
    """Outside connections shall live on at a restore here: the ended tree's peers must not be reset meanwhile."""
    kept_addresses: tuple[str, ...]
    """This host's ends of those connections, without loopback."""
    lock_timeout_ms: int
    deadline_seconds: float | None
    force_program: bool = False
    stream: bool = False
    """`images` holds only main's socket: CRIU hands its files over instead of writing them there."""
    huge_pages: bool = False
    """Transparent huge pages for the CUDA suspension, and for the resume where the tree goes on."""
    driver: GpuDriver | None = None
    """As main has seen it just now: to ask NVML once more takes as long as all of CRIU's restore of a small tree."""


INHERITED_FD = "fd:"
"""A path of this form is a descriptor that main passed to the owner at its start."""


@dataclass(frozen=True, slots=True)
class Inherited:
    """An outside end of the tree's stdio: CRIU's key for it and the file that takes its place."""

    key: str
    path: str
    """Absolute, or INHERITED_FD with a number."""
    readable: bool
    writable: bool


@dataclass(frozen=True, slots=True)
class OwnFile:
    """A file of the image for a /dev/shm that the tree has for itself."""

    source: str
    path: str
    link_to: str
    """Another name of it; '' for none."""
    mode: int
    uid: int
    gid: int
    mtime_ns: int


@dataclass(frozen=True, slots=True)
class Enclosed:
    """The namespaces that the tree shall have for itself."""

    pid: bool
    """A pid namespace, and mounts of its own with its /proc."""
    net: bool
    """A network of its own."""
    netns: str = ""
    """With `net`: the file of one that exists; '' for a new one with nothing but lo."""
    shm: bool = False
    """With `pid`: an empty /dev/shm with `files` in it."""
    files: tuple[OwnFile, ...] = ()
    binds: tuple[tuple[str, str], ...] = ()
    """With `pid`: directories of this host, and where the tree's mounts show them until it is whole."""
    needed: tuple[int, ...] = ()
    """With `pid`: the numbers that the tree takes in there."""
    image: str = ""
    """With `pid`: what process 1 says that it is the init of, where processes are listed."""


@dataclass(frozen=True, slots=True)
class RestoreOrder:
    """Bring the images up, give the GPU state back, let go."""

    run_directory: str
    tree: TreeOrder
    """Identities as of the dump: only the pids are valid here."""
    criu: str
    images: str
    options: CriuOptions
    handed_over_stopped: bool
    inherited: tuple[Inherited, ...]
    gpu_map: dict[str, str]
    wait: bool
    terminal: str | None
    """The pty slave that the tree shall have as its terminal (with `wait`)."""
    master: int | None
    """The descriptor of the pty's master that main passed to the owner: it outlives main."""
    cgroup_name: str | None
    deadline_seconds: float | None
    force_program: bool = False
    lean: bool = False
    """The images lack memory: CRIU leaves the tree stopped, we hold it and say `held`, main says `injected`."""
    fill: tuple[int, ...] = ()
    """Pids of the dump: while these are held we make a userfaultfd of each, for main to fill its memory."""
    huge_pages: bool = False
    """Transparent huge pages while the memory of CUDA processes is built and handed to the driver."""
    transaction: str = ""
    """A migration's: the tree is held when it is whole, we say `prepared`, and main's `go` lets it run."""
    enclosed: Enclosed | None = None
    driver: GpuDriver | None = None
    """As in DumpOrder."""


Given = Literal["resume", "hold", "end"]
"""What becomes of a tree that was given to another host: it runs here, it is held, it runs there."""


@dataclass(frozen=True, slots=True)
class RepairOrder:
    """Look at a tree that an interrupted run may have left held, and do what is right for what is seen."""

    run_directory: str
    left_behind: str | None
    """The run directory of the interrupted run, with its journal."""
    tree: TreeOrder
    deadline_seconds: float | None
    force_program: bool = False
    given: Given = "resume"
    """What the journal alone cannot know of a tree that was given away: the sender's knowledge, or a person's word."""


Order = DumpOrder | RestoreOrder | RepairOrder
ORDERS: dict[str, type[DumpOrder | RestoreOrder | RepairOrder]] = {
    "dump": DumpOrder,
    "restore": RestoreOrder,
    "repair": RepairOrder,
}


@dataclass(frozen=True, slots=True)
class Seen:
    """What one process was seen to be after the work: never believed, always looked at."""

    pid: int
    state: Literal["running", "frozen", "gone"]
    detail: str = ""


def order_to_json(order: Order) -> dict[str, Any]:
    """An order as a message."""
    kind = next(name for name, cls in ORDERS.items() if isinstance(order, cls))
    return {"say": "order", "kind": kind, "order": to_json(order)}


def order_from_json(message: dict[str, Any]) -> Order:
    """The order in a message; raises FormError or KeyError for anything else."""
    return from_json(ORDERS[message["kind"]], message["order"])


JOIN = b"\0"
"""What a spare owner is sent first, with the lock and the log of its run; their directory follows as a message."""


class Channel:
    """One end of the conversation."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._buffer = b""
        self._gone = False
        self._sending = threading.Lock()
        self._last_heard = time.monotonic()

    def fileno(self) -> int:
        """For select: readable means a message or the end."""
        return self._end.fileno()

    def send(self, say: str, **content: Any) -> None:
        """Send one message; raises PeerGone when nobody is there."""
        try:
            with self._sending:
                self._end.sendall(json.dumps({"say": say, **content}).encode() + b"\n")
        except OSError:
            self._gone = True
            raise PeerGone from None

    def receive(self, timeout: float | None = None) -> dict[str, Any] | None:
        """The next message, or None after `timeout` seconds; raises PeerGone at the end of file."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while b"\n" not in self._buffer:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not select.select([self._end], [], [], left)[0]:
                return None
            self._read_more()
        line, _, self._buffer = self._buffer.partition(b"\n")
        message = json.loads(line)
        if not isinstance(message, dict):
            raise PeerGone
        return message

    def waiting(self) -> bool:
        """A whole message lies in the buffer already: select would not tell."""
        return b"\n" in self._buffer

    def _read_more(self) -> None:
        try:
            chunk = self._end.recv(1 << 20)
        except OSError:
            chunk = b""
        if not chunk or len(self._buffer) > MAX_LINE_BYTES:
            self._gone = True
            raise PeerGone
        self._buffer += chunk
        self._last_heard = time.monotonic()

    def silent_seconds(self, since: float) -> float:
        """How long nothing has come from the peer, counted from `since` (time.monotonic) at the earliest."""
        return time.monotonic() - max(self._last_heard, since)

    @property
    def peer_is_gone(self) -> bool:
        """True once an end of file or a broken pipe was seen."""
        return self._gone

    def close(self) -> None:
        """Close this end: the peer sees the end of file."""
        self._end.close()

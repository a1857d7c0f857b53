"""What `criu dump --stream` hands over becomes packs and small files, while the tree stands still.

Two kinds of threads, and none may ever wait for another that waits for it:

- the reader: takes requests from CRIU and reads all small files, whichever has something;
- the workers: each in its turn takes a frame off a pages file (see intake.py), then reads it into its one
  buffer, hashes, compresses, and appends to a pack of its own, for writes to one file wait for each other.

The end is "inventory.img was seen and closed, no pipe is open, no frame under work": CRIU keeps the
connection until its post-dump script has ended, which waits for us. Whatever fails in any thread closes
all pipes; CRIU then gets EPIPE, undoes its work and lets the tree go on. Memory: a frame and its
compressed form per worker.
"""

from __future__ import annotations

import select
import threading
from dataclasses import field
from queue import SimpleQueue
from typing import TYPE_CHECKING

from gpuckpt.images import streaming
from gpuckpt.images.captureworker import READ_BYTES, Pages, Place, Small, SmallFile, Worker
from gpuckpt.images.cuts import Cuts
from gpuckpt.images.encoding import DEFAULT_LEVEL
from gpuckpt.images.intake import Intake, Source
from gpuckpt.images.packs import PackFile, PackSink, PackWriter
from gpuckpt.model.records import dataclass

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from gpuckpt.images.packindex import Frame

LAST_FILE = "inventory.img"
PIPE_BYTES = 8 << 20
"""Wanted for CRIU's pipes; it writes on while we look elsewhere."""


@dataclass(frozen=True, slots=True)
class Captured:
    """A complete capture. Pack numbers of the frames are positions in `packs`, then those `known` had."""

    small: tuple[SmallFile, ...]
    packs: tuple[PackFile | None, ...]
    files: dict[str, tuple[Frame, ...]]
    cuts: tuple[Cuts, ...]


@dataclass(frozen=True, slots=True)
class Settings:
    """How to capture."""

    workers: int
    level: int | None = DEFAULT_LEVEL
    """zstd's; None stores frames as they are."""
    digest_later: bool = False
    """The packs' own digests are taken when all are complete: where the tree runs again by then (--leave-running).
    Otherwise it waits for them, and many cores have time to spare while CRIU's one thread hands the pages over: read
    back at the end they took 1.1 s more for 17 GB on 16 cores. On 2 cores both take the same."""
    digest_key: bytes = field(default=b"", repr=False)
    """Of the frames' digests; where there is one, the packs are encrypted."""


class Capture:
    """One capture: `start`, then CRIU may come; `wait_complete`, `finish`; `close` in any case."""

    def __init__(
        self,
        sockets: Path,
        small_files: Path,
        packs: Path,
        settings: Settings,
        *,
        open_pack: Callable[[int], PackSink] | None = None,
        cuts_for: Callable[[int], Cuts | None] = lambda _: None,
        known: Mapping[bytes, Place] | None = None,
    ) -> None:
        """Listen in `sockets`, CRIU's images directory; both other directories exist and are empty.

        `open_pack` gives each worker its pack, by the worker's number; without it they grow in `packs`.
        `cuts_for` says where to cut the pages of a process; `known` are frames that need not be written.
        Raises OSError.
        """
        self.settings = settings
        self.stop = streaming.Stop()
        self.doors = streaming.Doors()
        self.known: dict[bytes, Place] = dict(known or {})
        self.intake = Intake(self.stop, self._pages_ended)
        self.to_sync: SimpleQueue[PackSink | None] = SimpleQueue()
        self.error: BaseException | None = None
        self.raw_bytes = 0
        """Taken so far, to show that there is progress."""
        self._cuts_for = cuts_for
        self._small_directory = small_files
        self._lock = threading.Lock()
        self._complete = threading.Event()
        self._open = 0
        self._last_seen = False
        self._small: list[SmallFile] = []
        self._pages: list[Pages] = []
        self._workers: list[Worker] = []
        self._threads = [
            threading.Thread(target=self._guarded, args=(self._read_all,), name="capture-reader", daemon=True),
            threading.Thread(target=self._guarded, args=(self._sync_all,), name="capture-sync", daemon=True),
        ]
        self._listener = streaming.listen(sockets)
        self.doors.add(self._listener.fileno())
        try:
            for number in range(settings.workers):
                pack = open_pack(number) if open_pack is not None else self._local_pack(packs, number)
                self._workers.append(Worker(self, number, pack))
        except BaseException:
            self.close()
            raise

    def _local_pack(self, directory: Path, number: int) -> PackWriter:
        settings = self.settings
        return PackWriter(
            directory, number, digest_at_once=not settings.digest_later, encrypt=bool(settings.digest_key)
        )

    def start(self) -> None:
        """Start the threads: from here on CRIU is served."""
        for thread in (*self._workers, *self._threads):
            thread.start()

    def wait_complete(self, seconds: float) -> bool:
        """Wait so long for the end of the stream and of all frames. Raises what failed in a thread."""
        done = self._complete.wait(seconds)
        if self.error is not None:
            raise self.error
        return done

    def finish(self) -> Captured:
        """All has come: finish the packs. Raises what failed in a thread (OSError for a full disk)."""
        self.intake.over()
        for worker in self._workers:
            worker.join()
        if self.error is not None:
            raise self.error
        files = {pages.name: pages.complete() for pages in self._pages}
        packs = tuple(worker.finished for worker in self._workers)
        return Captured(tuple(self._small), packs, files, tuple(pages.cuts for pages in self._pages))

    def fail(self, error: BaseException | None = None) -> None:
        """Stop everything: CRIU gets EPIPE and lets the tree go on. The first error is kept."""
        with self._lock:
            if not self.stop.is_raised():
                self.error = error
            self.stop.raise_()
        self.doors.shut()
        self._complete.set()

    def close(self) -> None:
        """End all threads and give everything back; what is not finished is removed."""
        self.fail()
        self.to_sync.put(None)
        for thread in (*self._threads, *self._workers):
            if thread.ident is not None:
                thread.join()
        for worker in self._workers:
            worker.close()
        self.intake.close()
        self.doors.close(self._listener)
        self.doors.give_back()
        self.stop.close()

    def count(self, raw: int) -> None:
        """Another frame was taken."""
        with self._lock:
            self.raw_bytes += raw

    def _guarded(self, work: Callable[..., None], *arguments: object) -> None:
        try:
            work(*arguments)
        except BaseException as error:  # noqa: BLE001 - whatever it is, the tree must go on
            self.fail(error)

    def _sync_all(self) -> None:
        """Bring packs to the disk while they grow."""
        while (pack := self.to_sync.get()) is not None:
            if not self.stop.is_raised():
                pack.sync()

    def _read_all(self) -> None:
        """The reader: CRIU's connection, and every small file."""
        if not streaming.Poller(self._listener.fileno(), select.POLLIN, self.stop).wait():
            return
        peer, _ = self._listener.accept()
        self.doors.add(peer.fileno())
        peer.settimeout(streaming.PEER_SECONDS)
        reader = _Reader(self, peer)
        try:
            reader.run()
        finally:
            reader.close()
            self.doors.close(peer)

    def begin(self, name: str, pipe: int, pid: int | None) -> Small | None:
        """CRIU has opened a file: a small one is returned to be read, a pages file is the workers'."""
        self.doors.add(pipe)
        self.begun()
        streaming.grow_pipe(pipe, PIPE_BYTES if name.startswith("pages-") else READ_BYTES)
        if not name.startswith("pages-"):
            return Small(name, pipe, self._small_directory, self.doors)
        pages = Pages(name)
        self._pages.append(pages)
        self.intake.add(Source(pages, pipe, lambda: None if pid is None else self._cuts_for(pid)))
        return None

    def begun(self) -> None:
        """Another frame is under work."""
        with self._lock:
            self._open += 1

    def _pages_ended(self, source: Source) -> None:
        self.doors.close(source.pipe)
        self.ended()

    def ended(self, small: SmallFile | None = None) -> None:
        """A file, or a frame, is complete."""
        with self._lock:
            if small is not None:
                self._small.append(small)
            self._open -= 1
            self._last_seen = self._last_seen or (small is not None and small.name == LAST_FILE)
            if self._last_seen and self._open == 0:
                self._complete.set()


class _Reader:
    """The reader's loop."""

    def __init__(self, capture: Capture, peer: socket.socket) -> None:
        self._capture = capture
        self._peer = peer
        self._files: dict[int, Small] = {}
        self._pid: int | None = None
        """Whose pagemap was asked for last: its pages come next."""
        self._poll = select.poll()
        self._poll.register(capture.stop.fileno(), select.POLLIN)
        self._poll.register(peer, select.POLLIN)

    def run(self) -> None:
        """Until CRIU has hung up and all small files are complete, or all shall stop."""
        connected = True
        while (connected or self._files) and not self._capture.stop.is_raised():
            for descriptor, _ in self._poll.poll():
                if descriptor in self._files:
                    self._read(descriptor)
                elif descriptor == self._peer.fileno():
                    connected = self._request()

    def _request(self) -> bool:
        """Take one request; False when CRIU has hung up."""
        name = streaming.read_request(self._peer)
        if name is None:
            self._poll.unregister(self._peer)
            return False
        pipe = streaming.receive_pipe(self._peer)
        if name.startswith("pagemap-"):
            middle = name.removeprefix("pagemap-").removesuffix(".img")
            self._pid = int(middle) if middle.isdigit() else None
        file = self._capture.begin(name, pipe, self._pid)
        if file is not None:
            self._files[pipe] = file
            self._poll.register(pipe, select.POLLIN)
        return True

    def _read(self, descriptor: int) -> None:
        if self._files[descriptor].read_some():
            return
        self._poll.unregister(descriptor)
        self._capture.ended(self._files.pop(descriptor).close())

    def close(self) -> None:
        """Give up what is open."""
        for file in self._files.values():
            file.close()

"""The workers of a capture: each turns frames into stored bytes; and the small files beside them (see capture.py)."""

from __future__ import annotations

import os
import threading
from dataclasses import field
from typing import TYPE_CHECKING

import blake3

from gpuckpt.images import streaming
from gpuckpt.images.cuts import Cuts
from gpuckpt.images.encoding import FrameCoder, checksum_of
from gpuckpt.images.packindex import FRAME_BYTES, ZERO, Frame, PackFile
from gpuckpt.images.packs import PackSink, digest_of, is_zero, page_aligned
from gpuckpt.model.errors import ImageCorrupt
from gpuckpt.model.records import dataclass

if TYPE_CHECKING:
    from pathlib import Path

    from gpuckpt.images.capture import Capture

WORKER_PIPE_BYTES = FRAME_BYTES + (FRAME_BYTES >> 2)
"""A whole frame, and some: a slot of a pipe may hold less than a page."""

READ_BYTES = 1 << 20
"""Of a small file at a time."""

SYNC_BYTES = 64 << 20
"""A pack is synced each time it has grown by that much, so that little is left to sync at the end."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where the bytes of a known digest lie: the pack's number, as in Frame."""

    pack: int
    at: int
    stored: int
    compressed: bool
    checksum: bytes = b""


@dataclass(frozen=True, slots=True)
class SmallFile:
    """A file as CRIU wrote it, below the directory for small files."""

    name: str
    size: int
    blake3: str


@dataclass(slots=True)
class Pages:
    """A pages file under work: the workers finish its frames in any order."""

    name: str
    frames: dict[int, Frame] = field(default_factory=dict)
    """By offset."""
    cuts: Cuts = field(default_factory=Cuts)

    def complete(self) -> tuple[Frame, ...]:
        """Its frames in order. Raises ImageCorrupt when one is missing."""
        frames = tuple(self.frames[offset] for offset in sorted(self.frames))
        ends = [0, *(frame.offset + frame.raw for frame in frames)]
        if [frame.offset for frame in frames] != ends[:-1]:
            raise ImageCorrupt(f"{self.name}: a frame was lost on the way", "this is a bug; dump again with --plain")
        return frames


class Worker(threading.Thread):
    """Turns frames into stored bytes, one after the other."""

    def __init__(self, capture: Capture, number: int, pack: PackSink) -> None:
        super().__init__(name=f"capture-{number}", daemon=True)
        self._capture = capture
        self._number = number
        self._digest_key = capture.settings.digest_key
        self._pack = pack
        self._synced = 0
        self._coder = FrameCoder(capture.settings.level)
        self._buffer = page_aligned(FRAME_BYTES)
        self._source, self.target = os.pipe()
        streaming.grow_pipe(self.target, WORKER_PIPE_BYTES)
        self._drained = 0
        """How much of the frame is in the buffer."""
        self.finished: PackFile | None = None

    def run(self) -> None:
        """Until nothing more comes; then the pack is finished. A failure is the capture's failure."""
        capture = self._capture
        try:
            while (taken := capture.intake.take(self, capture.begun)) is not None:
                self.drain(taken.length)
                self._drained = 0
                frame = self._frame(taken.offset, memoryview(self._buffer)[: taken.length])
                taken.source.pages.frames[taken.offset] = frame
                capture.ended()
            if not capture.stop.is_raised():
                self.finished = self._pack.finish()
        except BaseException as error:  # noqa: BLE001 - whatever it is, the tree must go on
            capture.fail(error)

    def drain(self, count: int) -> None:
        """Read until `count` bytes of the frame are in the buffer."""
        view = memoryview(self._buffer)
        while self._drained < count:
            self._drained += os.readv(self._source, [view[self._drained : count]])

    def _frame(self, offset: int, raw: memoryview) -> Frame:
        digest = digest_of(raw, self._digest_key)
        self._capture.count(len(raw))
        if is_zero(raw, digest, self._digest_key):
            return Frame(offset, len(raw), ZERO, 0, 0, compressed=False, digest=digest)
        place = self._capture.known.get(digest)
        if place is None:
            stored, compressed = self._coder.encode(raw)
            at = self._pack.append(stored)
            # The tag of an encrypted frame tells of every change.
            checksum = b"" if self._digest_key else checksum_of(stored, compressed=compressed)
            place = Place(self._number, at, self._pack.size - at, compressed, checksum)
            self._capture.known[digest] = place
            self._sync_sometimes()
        return Frame(offset, len(raw), place.pack, place.at, place.stored, place.compressed, digest, place.checksum)

    def _sync_sometimes(self) -> None:
        if self._pack.size - self._synced >= SYNC_BYTES:
            self._synced = self._pack.size
            self._capture.to_sync.put(self._pack)

    def close(self) -> None:
        """Close its pipe, and remove its pack unless that was finished."""
        os.close(self._source)
        os.close(self.target)
        if self.finished is None:
            self._pack.discard()


class Small:
    """A small file on its way to the disk."""

    def __init__(self, name: str, pipe: int, directory: Path, doors: streaming.Doors) -> None:
        self.name = name
        self.pipe = pipe
        self._doors = doors
        self._hasher = blake3.blake3()
        self._size = 0
        path = directory / name
        self._target = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)

    def read_some(self) -> bool:
        """Take what is there; False at the end. Raises OSError."""
        chunk = os.read(self.pipe, READ_BYTES)
        self._hasher.update(chunk)
        self._size += len(chunk)
        left = memoryview(chunk)
        while left:
            left = left[os.write(self._target, left) :]
        return bool(chunk)

    def close(self) -> SmallFile:
        """It is complete, or given up."""
        self._doors.close(self.pipe)
        os.close(self._target)
        return SmallFile(self.name, self._size, self._hasher.hexdigest())

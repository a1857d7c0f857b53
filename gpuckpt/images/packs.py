"""Packs: files of independent frames of memory, each compressed (zstd) or as it is.

A pack is written by one worker, front to back, and named at its end by the BLAKE3 of its bytes; from
then on it never changes, and images can share it. Readers trust nothing: a frame is used only after
its length and the BLAKE3 of its raw bytes were compared.

What is stored of a frame is images/encoding.py's; how it is read again, images/decoding.py's.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import stat
import threading
from typing import TYPE_CHECKING, Protocol, TypeVar

import blake3

from gpuckpt.images.decoding import Decoder, digest_of, zero_digest
from gpuckpt.images.packindex import (
    FRAME_BYTES,
    NAME,
    ZERO,
    Frame,
    Index,
    PackFile,
    Window,
    decode,
    encode,
    read_index,
    settled,
)
from gpuckpt.images.sealing import KEY_BYTES, TAG_BYTES, FrameCipher
from gpuckpt.model.errors import ImageCorrupt

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = [
    "FRAME_BYTES",
    "NAME",
    "ZERO",
    "Frame",
    "Index",
    "PackFile",
    "PackReader",
    "PackSink",
    "PackWriter",
    "Window",
    "decode",
    "digest_of",
    "encode",
    "is_zero",
    "page_aligned",
    "read_index",
    "settled",
]

MAX_THREADS = 16
"""Of those that read frames: 8 MiB of buffers each."""

READ_BACK_BYTES = 256 << 10
"""Of a finished pack at a time: a part of a core's own cache, so that the bytes cross the memory bus once."""

_AGAIN = "copy the image again, or restore another one"
Work = TypeVar("Work")


def page_aligned(length: int) -> mmap.mmap:
    """A buffer that begins at a page, for what the kernel copies to or from pages.

    To any other address its copy (rep movsb) takes five times as long on some CPUs: reading 2 GB out of a pipe
    took 1.2 s into a bytearray and 0.2 s into this (AMD EPYC, Linux 6.18).
    """
    return mmap.mmap(-1, length)


def is_zero(raw: memoryview, digest: bytes, key: bytes = b"") -> bool:
    """Whether a frame is all zero, told by its digest: comparing would hold the interpreter's lock."""
    if raw[0] or raw[-1] or raw[len(raw) // 2]:
        return False
    return digest == zero_digest(len(raw), key)


class PackSink(Protocol):
    """A pack under work, wherever it grows. One for each thread."""

    size: int
    """Bytes so far."""

    def append(self, stored: memoryview | bytes) -> int:
        """Take a frame's stored bytes; returns where they begin. Raises OSError, GpuckptError."""

    def sync(self) -> None:
        """From another thread: bring what came so far to the disk. Raises OSError."""

    def finish(self) -> PackFile | None:
        """It is complete; None where nothing came. Raises OSError, GpuckptError."""

    def discard(self) -> None:
        """It is not wanted."""


class PackWriter:
    """A pack under work. One for each thread; only `sync` may come from another one."""

    def __init__(self, directory: Path, number: int, *, digest_at_once: bool = False, encrypt: bool = False) -> None:
        """`digest_at_once`: the pack's own digest is kept up while it grows, not taken when it is complete.

        `encrypt`: under a key that no other pack has. Raises OSError.
        """
        self._key = os.urandom(KEY_BYTES) if encrypt else b""
        self._cipher = FrameCipher(self._key) if encrypt else None
        self._sealed = page_aligned(FRAME_BYTES + TAG_BYTES) if encrypt else None
        self._digest_at_once = digest_at_once
        self._hasher = blake3.blake3()
        self._digested = 0
        self._directory = directory
        self._path = directory / f"{number}.part"
        self._open = threading.Lock()
        """Held while the descriptor must stay what it is."""
        self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        self.size = 0
        """Bytes written so far."""

    def append(self, stored: memoryview | bytes) -> int:
        """Write a frame, encrypted where the pack is; returns where it begins, up to `size` then. Raises OSError."""
        if self._cipher is not None and self._sealed is not None:
            stored = self._cipher.seal(self.size, stored, memoryview(self._sealed))
        at, left = self.size, memoryview(stored)
        while left:
            left = left[os.write(self._descriptor, left) :]
        self.size += len(stored)
        if self._digest_at_once:
            self._hasher.update(stored)
            self._digested = self.size
        return at

    def sync(self) -> None:
        """What was written so far is on the disk when this returns. Raises OSError."""
        with self._open:
            if self._descriptor >= 0:
                os.fdatasync(self._descriptor)

    def finish(self) -> PackFile | None:
        """Sync it and give it its name; None (and no file) when nothing was written. Raises OSError."""
        if self.size == 0:
            self.discard()
            return None
        os.fsync(self._descriptor)
        pack = PackFile(self._digest(), self.size, self._key)
        self._path.rename(self._directory / pack.file)
        self._close()
        return pack

    def _digest(self) -> str:
        """BLAKE3 of the file; what is missing of it is read back, through a buffer that stays in the core's cache."""
        buffer = page_aligned(READ_BACK_BYTES)
        while self._digested < self.size:
            count = os.preadv(self._descriptor, [buffer], self._digested)
            if count == 0:
                raise OSError(errno.EIO, "the file is shorter than what was written", str(self._path))
            self._hasher.update(memoryview(buffer)[:count])
            self._digested += count
        return self._hasher.hexdigest()

    def discard(self) -> None:
        """Remove it."""
        self._close()
        self._path.unlink(missing_ok=True)

    def _close(self) -> None:
        with self._open:
            if self._descriptor >= 0:
                os.close(self._descriptor)
                self._descriptor = -1


class _Tools(threading.local):
    """What each reading thread has for itself."""

    def __init__(self) -> None:
        self._stored = self._raw = page_aligned(1)

    def stored(self, length: int) -> memoryview:
        """Room for a frame's stored bytes. It grows to what is needed."""
        if len(self._stored) < length:
            self._stored = page_aligned(length)
        return memoryview(self._stored)[:length]

    def raw(self, length: int) -> memoryview:
        """Room for a frame's raw bytes."""
        if len(self._raw) < length:
            self._raw = page_aligned(length)
        return memoryview(self._raw)[:length]


class PackReader:
    """Reads frames out of the packs of an image, from any number of threads at once."""

    def __init__(self, packs_directory: Path, index: Index) -> None:
        """Open every pack. Raises ImageCorrupt for one that is missing, a link, or of another size."""
        self._index = index
        self._tools = _Tools()
        self._decoder = Decoder(index)
        self._descriptors: list[int] = []
        try:
            for pack in index.packs:
                self._descriptors.append(_open_pack(packs_directory, pack))
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> PackReader:  # noqa: PYI034 - typing.Self comes with 3.11
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the packs."""
        while self._descriptors:
            os.close(self._descriptors.pop())

    def read(self, frame: Frame, buffer: mmap.mmap | None = None) -> memoryview:
        """The verified raw bytes of a frame.

        They lie in `buffer` (of at least frame.raw bytes), or else in a buffer of this thread that its next
        read uses again. Raises ImageCorrupt naming pack and frame.
        """
        target = self._tools.raw(frame.raw) if buffer is None else memoryview(buffer)[: frame.raw]
        if frame.pack == ZERO:
            target[:] = bytes(frame.raw)
            self.verify_zero(frame)
        elif frame.compressed or self._index.packs[frame.pack].key:
            self._decoder.decode(frame, self.stored(frame), target)
        else:
            self._fill(frame, target)
            self._decoder.verify(frame, target)
        return target

    @staticmethod
    def threads(_size: int) -> int:
        """One a core that we may use, at most MAX_THREADS."""
        return min(len(os.sched_getaffinity(0)), MAX_THREADS)

    def stream(self, wanted: Iterator[tuple[Frame, Work]], buffer: mmap.mmap) -> Iterator[tuple[Frame, Work]]:
        """Each frame in turn, its verified raw bytes then in `buffer`."""
        for frame, work in wanted:
            self.read(frame, buffer)
            yield frame, work

    def verify_zero(self, frame: Frame) -> None:
        """Compare the digest of a frame of which nothing is stored. Raises ImageCorrupt."""
        self._decoder.verify_zero(frame)

    def cut(self) -> None:
        """A read from a file ends by itself."""

    def stored(self, frame: Frame, buffer: mmap.mmap | None = None) -> memoryview:
        """The bytes of a frame as they lie in the pack, not verified, until this thread's next call, also of `read`."""
        target = self._tools.stored(frame.stored) if buffer is None else memoryview(buffer)[: frame.stored]
        self._fill(frame, target)
        return target

    def content(self, frame: Frame) -> memoryview:
        """As `stored`, decrypted where the pack is encrypted. Raises ImageCorrupt."""
        stored = self.stored(frame)
        return self._decoder.open(frame, stored) if self._index.packs[frame.pack].key else stored

    def _fill(self, frame: Frame, target: memoryview) -> None:
        done = 0
        try:
            while done < len(target):
                count = os.preadv(self._descriptors[frame.pack], [target[done:]], frame.at + done)
                if count == 0:
                    raise self._decoder.corrupt(frame, "the pack ends in it")
                done += count
        except OSError as error:
            raise self._decoder.corrupt(frame, error.strerror or "cannot be read") from None


def _open_pack(directory: Path, pack: PackFile) -> int:
    try:
        descriptor = os.open(directory / pack.file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        why = "it is a link" if error.errno == errno.ELOOP else error.strerror
        raise ImageCorrupt(f"packs/{pack.file} cannot be read: {why}", _AGAIN) from None
    seen = os.fstat(descriptor)
    if stat.S_ISREG(seen.st_mode) and seen.st_size == pack.size:
        return descriptor
    with contextlib.suppress(OSError):
        os.close(descriptor)
    raise ImageCorrupt(f"packs/{pack.file} has {seen.st_size} bytes, the index says {pack.size}", _AGAIN)

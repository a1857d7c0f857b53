"""packs/index: which bytes of which pages file lie where in which pack.

Binary, little endian: a header, the packs, the pages files with their frames, the windows, and a BLAKE3
of all that. In an encrypted image (version 2, and a sealed file: images/sealing.py) the key of the frames'
digests stands behind the header, and each pack's key behind the pack. In another one (version 3; version 1 before)
each frame has its zstd checksum beside it. A reader takes it all for hostile: every number is checked before it is
used, so that what `decode` returns can be read without leaving a pack.
"""

from __future__ import annotations

import os
import re
import stat
import struct
from dataclasses import field, replace
from typing import TYPE_CHECKING

import blake3

from gpuckpt.images.sealing import TAG_BYTES
from gpuckpt.model.errors import ImageCorrupt, ImageTooNew
from gpuckpt.model.records import dataclass

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

NAME = "index"
FRAME_BYTES = 4 << 20
"""The most raw bytes of a frame, and the size of the windows that frames are cut by."""

ZERO = -1
"""The pack of a frame that is all zero: nothing is stored of it."""

MAX_INDEX_BYTES = 64 << 20
"""Read whole, from files that may be hostile: enough for 4 TB of memory."""

VERSION = 3
_PLAIN, _KEYED, _CHECKSUMS = 1, 2, 3
"""Versions: without keys, as gpuckpt wrote it first; with keys; without keys and with checksums."""
_MAGIC = b"GPUCKIDX"
_HEADER = struct.Struct("<8sIIII")
"""Magic, version, number of packs, of pages files, of windows."""
_PACK = struct.Struct("<32sQ")
_KEY_BYTES = 32
_FILE = struct.Struct("<HI")
"""Length of the name, number of frames."""
_FRAME = struct.Struct("<IiQIB32s")
"""Raw bytes, pack, place in it, stored bytes, whether compressed, BLAKE3 of the raw bytes."""
_FRAME_CHECKSUM = struct.Struct("<IiQIB32s4s")
"""The same, and the last bytes of its zstd frame where _KNOWN says so; else zero."""
_RAW, _COMPRESSED, _KNOWN = 0, 1, 2
"""How a frame is stored: as it is, compressed, compressed with its checksum beside it."""
_WINDOW = struct.Struct("<IQQQ")
_DIGEST_BYTES = 32
_PAGES_NAME = re.compile(rb"pages-[0-9]{1,20}\.img")
_AGAIN = "copy the image again, or restore another one"


@dataclass(frozen=True, slots=True)
class Frame:
    """A piece of a pages file: at most FRAME_BYTES, stored once, read and verified as one."""

    offset: int
    """Where it begins in the pages file, in bytes."""
    raw: int
    """Its bytes there."""
    pack: int
    """Index into Index.packs, or ZERO."""
    at: int
    """Where its stored bytes begin in the pack."""
    stored: int
    compressed: bool
    """Stored as a zstd frame; else as it is."""
    digest: bytes
    """BLAKE3 of the raw bytes, with the index's key where it has one."""
    checksum: bytes = b""
    """The Content_Checksum that ends its zstd frame (RFC 8878, 3.1.1), for whoever reads it: to compare that, and the
    raw bytes with their digest, finds what zstd's own checking finds. Empty where there is none, or none is known."""


@dataclass(frozen=True, slots=True)
class PackFile:
    """A finished pack: packs/<name>.zst."""

    name: str
    """BLAKE3 of the stored bytes, in hex."""
    size: int
    key: bytes = field(default=b"", repr=False)
    """Of its frames; empty where they are not encrypted."""

    @property
    def file(self) -> str:
        """Its name in packs/."""
        return f"{self.name}.zst"


@dataclass(frozen=True, slots=True)
class Window:
    """How a large mapping was cut, so that a later dump can cut it alike: frames end at origin + n * FRAME_BYTES."""

    pid: int
    start: int
    end: int
    origin: int


@dataclass(frozen=True, slots=True)
class Index:
    """The whole of packs/index."""

    packs: tuple[PackFile, ...]
    files: dict[str, tuple[Frame, ...]]
    """'pages-1.img' -> its frames, contiguous from 0."""
    windows: tuple[Window, ...] = field(default=())
    digest_key: bytes = field(default=b"", repr=False)
    """Of the frames' digests, so that who sees one cannot try out what was digested; empty where none is encrypted."""

    def raw_bytes(self) -> int:
        """The bytes of all pages files."""
        return sum(frames[-1].offset + frames[-1].raw for frames in self.files.values() if frames)


def encode(index: Index) -> bytes:
    """The bytes of packs/index."""
    version = _KEYED if index.digest_key else _CHECKSUMS
    out = bytearray(_HEADER.pack(_MAGIC, version, len(index.packs), len(index.files), len(index.windows)))
    out += index.digest_key
    for pack in index.packs:
        out += _PACK.pack(bytes.fromhex(pack.name), pack.size) + pack.key
    for name, frames in index.files.items():
        out += _FILE.pack(len(name), len(frames)) + name.encode("ascii")
        for frame in frames:
            out += _encoded(frame, version)
    for window in index.windows:
        out += _WINDOW.pack(window.pid, window.start, window.end, window.origin)
    return bytes(out) + blake3.blake3(out).digest()


def _encoded(frame: Frame, version: int) -> bytes:
    place = frame.raw, frame.pack, frame.at, frame.stored
    if version == _KEYED:
        return _FRAME.pack(*place, frame.compressed, frame.digest)
    how = _KNOWN if frame.checksum else _COMPRESSED if frame.compressed else _RAW
    return _FRAME_CHECKSUM.pack(*place, how, frame.digest, frame.checksum)


def decode(raw: bytes, where: str) -> Index:
    """Read packs/index. Raises ImageCorrupt naming `where`, ImageTooNew for a later version."""
    body, digest = memoryview(raw)[:-_DIGEST_BYTES], raw[-_DIGEST_BYTES:]
    if len(raw) > MAX_INDEX_BYTES or len(body) < _HEADER.size or not raw.startswith(_MAGIC):
        raise ImageCorrupt(f"{where}: no index of packs", _AGAIN)
    if blake3.blake3(body).digest() != digest:
        raise ImageCorrupt(f"{where}: cut or damaged, its digest does not fit", _AGAIN)
    _, version, packs, files, windows = _HEADER.unpack_from(body)
    if version < _PLAIN:
        raise ImageCorrupt(f"{where}: index version {version}", _AGAIN)
    if version > VERSION:
        raise ImageTooNew(
            f"{where}: index version {version}, this gpuckpt reads up to {VERSION}", "install a newer one"
        )
    try:
        return _Reader(body, version).index(packs, files, windows)
    except (struct.error, ValueError) as error:
        raise ImageCorrupt(f"{where}: {error}", _AGAIN) from None


class _Reader:
    """Takes the body apart, front to back. Raises struct.error or ValueError for what cannot be."""

    def __init__(self, body: memoryview, version: int) -> None:
        self._body = body
        self._with_keys = version == _KEYED
        self._frame = _FRAME_CHECKSUM if version == _CHECKSUMS else _FRAME
        self._position = _HEADER.size

    def index(self, packs: int, files: int, windows: int) -> Index:
        """The whole; the numbers are those of the header."""
        digest_key = self._key()
        known = tuple(self._pack() for _ in range(packs))
        if len({pack.name for pack in known}) != len(known):
            raise ValueError("a pack is named twice")
        content: dict[str, tuple[Frame, ...]] = {}
        for _ in range(files):
            name, count = self._file()
            if name in content:
                raise ValueError(f"{name} stands there twice")
            content[name] = self._frames(count, known)
        index = Index(known, content, tuple(self._window() for _ in range(windows)), digest_key)
        if self._position != len(self._body):
            raise ValueError("more bytes than it should have")
        return index

    def _take(self, form: struct.Struct) -> tuple[int, ...]:
        values = form.unpack_from(self._body, self._position)
        self._position += form.size
        return values

    def _pack(self) -> PackFile:
        name, size = _PACK.unpack_from(self._body, self._position)
        self._position += _PACK.size
        return PackFile(name.hex(), size, self._key())

    def _key(self) -> bytes:
        if not self._with_keys:
            return b""
        key = bytes(self._body[self._position : self._position + _KEY_BYTES])
        if len(key) != _KEY_BYTES:
            raise ValueError("cut in a key")
        self._position += _KEY_BYTES
        return key

    def _file(self) -> tuple[str, int]:
        length, count = self._take(_FILE)
        name = bytes(self._body[self._position : self._position + length])
        self._position += length
        if not _PAGES_NAME.fullmatch(name):
            raise ValueError("a name that is no pages file's")
        return name.decode("ascii"), count

    def _frames(self, count: int, packs: tuple[PackFile, ...]) -> tuple[Frame, ...]:
        end = self._position + count * self._frame.size
        if end > len(self._body):
            raise ValueError("fewer frames than it says")
        frames: list[Frame] = []
        offset = 0
        for raw, pack, at, stored, how, digest, *end_of in self._frame.iter_unpack(self._body[self._position : end]):
            checksum = _checksum_of(how, *end_of)
            frame = Frame(offset, raw, pack, at, stored, how != _RAW, digest, checksum)
            _refuse_impossible(frame, packs)
            frames.append(frame)
            offset += raw
        self._position = end
        return tuple(frames)

    def _window(self) -> Window:
        return Window(*self._take(_WINDOW))


def _checksum_of(how: int, last_bytes: bytes | None = None) -> bytes:
    """The checksum in a frame's entry, of which an older version has none. Raises ValueError."""
    if how == _KNOWN and last_bytes is not None:
        return last_bytes
    if how not in (_RAW, _COMPRESSED) or any(last_bytes or b""):
        raise ValueError("a frame stored in an unknown way")
    return b""


def _refuse_impossible(frame: Frame, packs: tuple[PackFile, ...]) -> None:
    """Raises ValueError for a frame that no writer makes, above all one that leaves its pack."""
    if not 0 < frame.raw <= FRAME_BYTES:
        raise ValueError(f"a frame of {frame.raw} bytes")
    if frame.pack == ZERO:
        possible = frame.at == 0 and frame.stored == 0 and not frame.compressed
    else:
        fits = 0 <= frame.pack < len(packs) and frame.at + frame.stored <= packs[frame.pack].size
        content = frame.stored - (TAG_BYTES if fits and packs[frame.pack].key else 0)
        possible = fits and (0 < content < frame.raw if frame.compressed else content == frame.raw)
    if not possible:
        raise ValueError(f"the frame at {frame.offset} cannot be where it is said to be")


def settled(
    files: Mapping[str, Iterable[Frame]],
    packs: Sequence[PackFile | None],
    windows: Iterable[Window] = (),
    digest_key: bytes = b"",
) -> Index:
    """The index of frames whose pack numbers are positions in `packs`.

    Packs that no frame lies in drop out, and equal ones (two workers may have written the same) become one.
    """
    used = sorted({frame.pack for frames in files.values() for frame in frames} - {ZERO})
    kept = list({pack.name: pack for place in used if (pack := packs[place]) is not None}.values())
    places = {pack.name: place for place, pack in enumerate(kept)}
    numbers = {place: places[pack.name] for place in used if (pack := packs[place]) is not None}
    numbers[ZERO] = ZERO
    moved = {
        name: tuple(replace(frame, pack=numbers[frame.pack]) for frame in frames) for name, frames in files.items()
    }
    return Index(tuple(kept), moved, tuple(windows), digest_key)


def read_index(path: Path) -> Index:
    """Read an index file, following no link. Raises ImageCorrupt naming it, ImageTooNew."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise ImageCorrupt(f"{path} cannot be read: {error.strerror}", _AGAIN) from None
    with os.fdopen(descriptor, "rb", buffering=0) as file:
        seen = os.fstat(file.fileno())
        if not stat.S_ISREG(seen.st_mode) or seen.st_size > MAX_INDEX_BYTES:
            raise ImageCorrupt(f"{path} is no index of packs", _AGAIN)
        return decode(file.read(MAX_INDEX_BYTES + 1), str(path))

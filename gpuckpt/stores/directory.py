"""Images as directories of this host: made beside, published whole, never changed after.

An image under work is IMAGE.partial, 0700, locked by its maker. It becomes IMAGE by one rename after
everything in it has reached the disk; the presence of manifest.json in IMAGE means "complete". An
unlocked IMAGE.partial is what a killed maker left: worthless, removed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import blake3

from gpuckpt.model import manifest as manifests
from gpuckpt.model.errors import Busy, ImageCorrupt, NotFound, Refused
from gpuckpt.model.manifest import Part

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

CHUNK_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class PartialImage:
    """An image under work. Its maker holds `lock_fd` until it is published or discarded."""

    target: Path
    path: Path
    lock_fd: int

    @property
    def criu(self) -> Path:
        """CRIU's files."""
        return self.path / "criu"

    @property
    def files(self) -> Path:
        """Captured files."""
        return self.path / "files"

    def discard(self) -> None:
        """Remove it: nothing of a failed dump stays."""
        shutil.rmtree(self.path, ignore_errors=True)
        with contextlib.suppress(OSError):
            os.close(self.lock_fd)

    def sync_parts(self) -> None:
        """Every file and directory is on the disk when this returns. Raises OSError."""
        for directory, _, names in os.walk(self.path):
            for name in names:
                _sync(Path(directory) / name)
            _sync(Path(directory))

    def publish(self, raw_manifest: bytes) -> None:
        """Write the manifest last, then rename. Raises OSError; the partial is then still there to be discarded."""
        descriptor = os.open(self.path / manifests.NAME, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(raw_manifest)
                file.flush()
                os.fsync(file.fileno())
            _sync(self.path)
            if self.target.exists():
                raise FileExistsError(17, "an image of this name has appeared meanwhile", str(self.target))
            self.path.rename(self.target)
            _sync(self.target.parent)
        finally:
            with contextlib.suppress(OSError):
                os.close(self.lock_fd)


def create_partial(target: Path) -> tuple[PartialImage, str]:
    """Make IMAGE.partial; returns it and a note when a killed maker's leftover was removed.

    Raises Busy when another gpuckpt makes it right now, Refused when IMAGE exists, OSError.
    """
    path = target.with_name(target.name + ".partial")
    if os.path.lexists(target):
        raise Refused(f"{target} exists already", "choose another name, or remove it")
    note = _remove_leftover(path)
    path.mkdir(mode=0o700)
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    partial = PartialImage(target, path, descriptor)
    partial.criu.mkdir(mode=0o700)
    return partial, note


def _remove_leftover(path: Path) -> str:
    if not os.path.lexists(path):
        return ""
    if path.is_symlink() or not path.is_dir():
        raise Refused(f"{path} is in the way and is no leftover of gpuckpt", "remove it")
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise Busy(f"another gpuckpt is making {path} right now", "wait for it to end") from None
    finally:
        os.close(descriptor)
    shutil.rmtree(path)
    return f"removed {path}, which a killed dump had left"


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def digest(path: Path, going_on: Callable[[], None] = lambda: None) -> str:
    """BLAKE3 of a file, with all cores, reading it once. `going_on` is called between pieces and may raise."""
    hasher = blake3.blake3(max_threads=blake3.blake3.AUTO)
    buffer = bytearray(CHUNK_BYTES)
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb", buffering=0) as file:
        while size := file.readinto(buffer):
            hasher.update(memoryview(buffer)[:size])
            going_on()
    return hasher.hexdigest()


def describe_parts(root: Path, going_on: Callable[[], None] = lambda: None) -> tuple[Part, ...]:
    """Every file below `root` with its size and digest, in a fixed order."""
    return tuple(
        Part(str(path.relative_to(root)), path.stat().st_size, digest(path, going_on)) for path in _files(root)
    )


def _files(root: Path) -> Iterator[Path]:
    yield from sorted(path for path in root.rglob("*") if path.is_file() and not path.is_symlink())


@dataclass(frozen=True, slots=True)
class Image:
    """A published image. While it is open a shared lock keeps it from being pruned."""

    path: Path
    manifest: manifests.Manifest
    lock_fd: int

    def part(self, name: str) -> Path:
        """The path of a part."""
        return self.path / name

    def close(self) -> None:
        """Give the lock back."""
        os.close(self.lock_fd)

    def bytes_on_disk(self) -> int:
        """Allocated bytes of all its files."""
        return sum(path.stat().st_blocks * 512 for path in _files(self.path))


def open_image(path: Path) -> Image:
    """Open a published image and read its manifest.

    Raises NotFound, ImageCorrupt or ImageTooNew; Refused when others than its owner can write to it.
    """
    if not path.is_dir():
        raise NotFound(f"{path}: no such image", "name a directory that `gpuckpt dump` made")
    _refuse_writable_by_others(path)
    descriptor = _open_manifest(path)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        raw = os.pread(descriptor, manifests.MAX_BYTES + 1, 0)
        return Image(path, manifests.decode(raw, str(path / manifests.NAME)), descriptor)
    except BlockingIOError:
        os.close(descriptor)
        raise Busy(f"{path} is being removed by another gpuckpt") from None
    except BaseException:
        os.close(descriptor)
        raise


def _open_manifest(path: Path) -> int:
    try:
        return os.open(path / manifests.NAME, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        partial = path.name.endswith(".partial")
        why = "a dump that was never finished" if partial else "no manifest.json in it"
        raise ImageCorrupt(f"{path} is no complete image: {why}", "dump again, or copy the image again") from None


def _refuse_writable_by_others(path: Path) -> None:
    seen = path.stat()
    if seen.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise Refused(
            f"{path} can be written to by others (mode {stat.S_IMODE(seen.st_mode):04o})",
            "an image is run as root when it is restored: chmod 0700 it if you trust its content",
        )
    if seen.st_uid not in (0, os.geteuid()):
        raise Refused(f"{path} belongs to user {seen.st_uid}", "chown it to root if you trust its content")


def verify(image: Image, going_on: Callable[[], None] = lambda: None) -> None:
    """Read every byte of every part and compare. Raises ImageCorrupt naming the first part that does not fit."""
    for part in image.manifest.parts:
        _verify_part(image.part(part.path), part, going_on)


def _verify_part(path: Path, part: Part, going_on: Callable[[], None]) -> None:
    again = "copy the image again, or restore an older one"
    try:
        size = path.stat(follow_symlinks=False).st_size
        if _has_link(path, part.path):
            raise ImageCorrupt(f"part {part.path} is reached through a link", "do not restore this image")
        if size != part.size:
            raise ImageCorrupt(f"part {part.path} has {size} bytes, the manifest says {part.size}", again)
        if digest(path, going_on) != part.blake3:
            raise ImageCorrupt(f"part {part.path} is damaged: its digest does not fit", again)
    except OSError as error:
        raise ImageCorrupt(f"part {part.path} cannot be read: {error.strerror}", again) from None


def _has_link(path: Path, relative: str) -> bool:
    return any(step.is_symlink() for step in (path, *list(path.parents)[: relative.count("/")]))


def sizes(parts: Sequence[Part]) -> int:
    """The bytes of all parts together."""
    return sum(part.size for part in parts)

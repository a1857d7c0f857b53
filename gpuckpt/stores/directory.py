"""Published images as directories of this host: opened, verified, removed, never changed.

How they are made: stores/partialimage.py.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import blake3

from gpuckpt.model import manifest as manifests
from gpuckpt.model import series
from gpuckpt.model.errors import Busy, GpuckptError, ImageCorrupt, MachineLacks, NotFound, Refused
from gpuckpt.model.manifest import Part
from gpuckpt.model.records import dataclass
from gpuckpt.stores import protection
from gpuckpt.stores.partialimage import PARTIAL_SUFFIX, sync
from gpuckpt.stores.protocol import IsSeries
from gpuckpt.system import procfs
from gpuckpt.system.files import user_of_files

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

CHUNK_BYTES = 4 << 20
AS_ROOT = "run it as root: sudo gpuckpt ..."

NOT_DIGESTED = frozenset({manifests.NAME, manifests.SIGNATURE, "criu-dump.log", *protection.NAMES})
"""Files of an image that are no parts: the manifest carries its own digest, which its signature signs, the log is only
for people, and where copies of it lie is noted later."""

MAX_SIGNATURE_BYTES = 16 << 10
Admit = Callable[[bytes, bytes], None]
"""Called with a manifest's bytes and those of its signature (b'' where there is none) before anything is parsed of
them; raises Refused."""


def digest(path: Path, going_on: Callable[[], None] = lambda: None, *, from_disk: bool = False) -> str:
    """BLAKE3 of a file, with all cores, reading it once. `going_on` is called between pieces and may raise.

    With `from_disk` the kernel first drops what it has of the file in memory: damage on the disk is seen.
    """
    hasher = blake3.blake3(max_threads=blake3.blake3.AUTO)
    buffer = mmap.mmap(-1, CHUNK_BYTES)  # page-aligned, see images.packs.page_aligned
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb", buffering=0) as file:
        if from_disk:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        while size := file.readinto(buffer):
            hasher.update(memoryview(buffer)[:size])
            going_on()
    return hasher.hexdigest()


def describe_parts(
    root: Path, going_on: Callable[[], None] = lambda: None, *, below: Path | None = None
) -> tuple[Part, ...]:
    """Every file below `root` (or only those `below` a directory of it) with size and digest, in a fixed order."""
    return tuple(
        Part(str(path.relative_to(root)), path.stat().st_size, digest(path, going_on)) for path in _files(below or root)
    )


def _files(root: Path) -> Iterator[Path]:
    yield from sorted(path for path in root.rglob("*") if path.is_file() and not path.is_symlink())


@dataclass(frozen=True, slots=True)
class Image:
    """A published image. While it is open a shared lock keeps it from being pruned."""

    path: Path
    """Its name, for words alone: another image may stand there by now."""
    manifest: manifests.Manifest
    lock_fd: int
    directory_fd: int
    signature: bytes = b""
    """Of the manifest; b'' where it has none."""

    @property
    def root(self) -> Path:
        """The directory that was opened, for this process and others, while this process has it open."""
        return procfs.descriptor_path(self.directory_fd)

    def part(self, name: str) -> Path:
        """The path of a part below `root`."""
        return self.root / name

    def close(self) -> None:
        """Give the lock back."""
        os.close(self.lock_fd)
        os.close(self.directory_fd)

    def raw_manifest(self) -> bytes:
        """The bytes of its manifest."""
        return os.pread(self.lock_fd, manifests.MAX_BYTES + 1, 0)

    def bytes_on_disk(self) -> int:
        """Allocated bytes of all its files."""
        return sum(path.stat().st_blocks * 512 for path in _files(self.root))


def open_image(path: Path, admit: Admit | None = None) -> Image:
    """Open a published image and read its manifest, once `admit` has let it pass.

    Raises NotFound, ImageCorrupt or ImageTooNew; Refused when others than its owner can write to it;
    MachineLacks when this user may not read it; and what `admit` raises.
    """
    _require_directory(path)
    if path.name.endswith(PARTIAL_SUFFIX):
        # Even with a manifest in it: what was never renamed was never known to be on the disk.
        raise ImageCorrupt(f"{path} is no complete image: a dump that was never finished", "dump again")
    # From here on only through this descriptor: what is verified is what is restored, whatever happens to the path.
    directory_fd = _open_directory(path)
    try:
        return _open_locked(path, directory_fd, admit)
    except BaseException:
        os.close(directory_fd)
        raise


def _open_locked(path: Path, directory_fd: int, admit: Admit | None) -> Image:
    descriptor = _open_manifest(path, directory_fd)
    try:
        _refuse_writable_by_others(path, procfs.descriptor_path(directory_fd))
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        _refuse_removed(path, descriptor)
        raw = os.pread(descriptor, manifests.MAX_BYTES + 1, 0)
        signature = _read_signature(directory_fd)
        if admit is not None:
            admit(raw, signature)
        return Image(path, manifests.decode(raw, str(path / manifests.NAME)), descriptor, directory_fd, signature)
    except BlockingIOError:
        os.close(descriptor)
        raise Busy(f"{path} is being removed by another gpuckpt", "choose another image") from None
    except BaseException:
        os.close(descriptor)
        raise


def _refuse_removed(path: Path, descriptor: int) -> None:
    if os.fstat(descriptor).st_nlink == 0:
        raise NotFound(f"{path} has just been removed by another gpuckpt", "choose another image")


def _read_signature(directory_fd: int) -> bytes:
    """No bytes where there is none that can be read: that is no signature, and whoever asks for one refuses it."""
    try:
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        descriptor = os.open(manifests.SIGNATURE, flags, dir_fd=directory_fd)
    except OSError:
        return b""
    with os.fdopen(descriptor, "rb") as file:
        return file.read(MAX_SIGNATURE_BYTES) if stat.S_ISREG(os.fstat(descriptor).st_mode) else b""


def _require_directory(path: Path) -> None:
    made = "name a directory that `gpuckpt dump` made"
    try:
        mode = path.stat().st_mode
    except PermissionError:
        raise MachineLacks(f"{path} may not be read by this user", AS_ROOT) from None
    except OSError:
        hint = f"{made}; for a process: --tree {path.name}" if path.name.isdigit() else made
        if series.parse(path.name) is not None:
            hint = f"older images of a series go by its rules; the newest is {path.parent / series.LATEST}"
        raise NotFound(f"{path}: no such image", hint) from None
    if not stat.S_ISDIR(mode):
        what = "a file" if stat.S_ISREG(mode) else "no directory"
        raise NotFound(f"{path} is {what}, not an image directory", made)


def open_for_removal(path: Path) -> Image:
    """Open an image that shall be removed: nobody else has it open. Raises as `open_image`, Busy."""
    image = open_image(path)
    try:
        fcntl.flock(image.lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        image.close()
        raise Busy(f"{path} is in use by another gpuckpt", "wait for it to end") from None
    return image


def remove(image: Image) -> None:
    """Remove an image that was opened for removal. From the first step on it is none any more: a crash leaves no half.

    Raises Busy where another one stands under its name by now, OSError.
    """
    if not os.path.samestat(os.fstat(image.directory_fd), image.path.lstat()):
        raise Busy(f"{image.path} is another image by now", "look at it with `ls -ld`")
    gone = image.path.with_name(image.path.name + PARTIAL_SUFFIX)
    image.path.rename(gone)
    sync(image.path.parent)
    shutil.rmtree(gone)


def _open_directory(path: Path) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except PermissionError:
        raise MachineLacks(f"{path} may not be read by this user", AS_ROOT) from None
    except OSError as error:
        raise NotFound(f"{path} cannot be opened: {error.strerror}", "look at it with `ls -ld`") from None


def _open_manifest(path: Path, directory_fd: int) -> int:
    manifest = path / manifests.NAME
    again = "dump again, or copy the image again"
    try:
        # Non-blocking: a FIFO of this name must not hold us for ever.
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        descriptor = os.open(manifests.NAME, flags, dir_fd=directory_fd)
    except FileNotFoundError:
        raise _no_manifest(path, again) from None
    except PermissionError:
        raise MachineLacks(f"{manifest} may not be read by this user", AS_ROOT) from None
    except OSError as error:
        why = "it is a link" if error.errno == errno.ELOOP else error.strerror
        raise ImageCorrupt(f"{manifest} cannot be read: {why}", again) from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ImageCorrupt(f"{manifest} is no regular file", again)
    return descriptor


def _no_manifest(path: Path, again: str) -> GpuckptError:
    if (path / "criu").is_dir():
        return ImageCorrupt(f"{path} is no complete image: no {manifests.NAME} in it", again)
    names: list[str] = []
    with contextlib.suppress(OSError):
        names = os.listdir(path)  # noqa: PTH208 - names, not paths
    newest = series.newest_of(names, latest_in(path))
    if newest:
        shown = series.LATEST if series.LATEST in names else newest
        words = f"{path} is a series of images, not an image"
        return IsSeries(words, f"name one of them; the newest is {path / shown}", newest)
    hint = f"is this the right directory? An image has a {manifests.NAME}"
    return ImageCorrupt(f"{path} is no complete image: no {manifests.NAME} in it", hint)


def latest_in(place: Path) -> str:
    """What DIR/latest leads to; empty where there is no such link."""
    try:
        return os.readlink(place / series.LATEST)  # noqa: PTH115 - the text
    except OSError:
        return ""


def _refuse_writable_by_others(path: Path, root: Path) -> None:
    """Whoever can write to any part can replace it after it was verified, and decides what a restore runs."""
    for found in (root, *root.rglob("*")):
        seen = found.stat(follow_symlinks=found == root)
        if stat.S_ISLNK(seen.st_mode):
            continue  # refused as a part, by its name
        place = path / found.relative_to(root)
        if seen.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise Refused(
                f"{place} can be written to by others (mode {stat.S_IMODE(seen.st_mode):04o})",
                f"an image is run as root when it is restored: chmod -R go-w {path} if you trust its content",
            )
        if seen.st_uid not in (0, user_of_files()):
            raise Refused(f"{place} belongs to user {seen.st_uid}", f"chown -R 0:0 {path} if you trust its content")


def verify(
    image: Image,
    going_on: Callable[[], None] = lambda: None,
    *,
    but: frozenset[str] = frozenset(),
    absent: frozenset[str] = frozenset(),
    from_disk: bool = False,
) -> None:
    """Read every byte of every part, with all cores. Raises ImageCorrupt naming the first part that does not fit.

    Of the parts in `but` the caller reads and verifies the content itself, as it is used; those in `absent`
    lie elsewhere. `from_disk` as for `digest`.
    """

    def compare(part: Part) -> None:
        verify_part(image.part(part.path), part, going_on, content=part.path not in but, from_disk=from_disk)

    from concurrent.futures import ThreadPoolExecutor  # noqa: PLC0415  only who reads all of it needs them

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        try:
            for _ in pool.map(compare, [part for part in image.manifest.parts if part.path not in absent]):
                going_on()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    known = {part.path for part in image.manifest.parts} | NOT_DIGESTED
    root = image.root
    for place in sorted(root.rglob("*")):
        name = str(place.relative_to(root))
        if name not in known and (place.is_symlink() or not place.is_dir()):
            raise ImageCorrupt(f"{name} is no part of the image: the manifest does not name it", "remove it")


def verify_part(
    path: Path, part: Part, going_on: Callable[[], None], *, content: bool = True, from_disk: bool = False
) -> None:
    """Compare a file with what the manifest says of it. Raises ImageCorrupt."""
    again = "copy the image again, or restore an older one"
    try:
        seen = path.stat(follow_symlinks=False)
        if has_link(path, part.path):
            raise ImageCorrupt(f"part {part.path} is reached through a link", "do not restore this image")
        if not stat.S_ISREG(seen.st_mode):
            raise ImageCorrupt(f"part {part.path} is no regular file", again)
        if seen.st_size != part.size:
            raise ImageCorrupt(f"part {part.path} has {seen.st_size} bytes, the manifest says {part.size}", again)
        if content and digest(path, going_on, from_disk=from_disk) != part.blake3:
            raise ImageCorrupt(f"part {part.path} is damaged: its digest does not fit", again)
    except OSError as error:
        raise ImageCorrupt(f"part {part.path} cannot be read: {error.strerror}", again) from None


def has_link(path: Path, relative: str) -> bool:
    """A step of the path `relative`, which `path` ends with, is a link."""
    return any(step.is_symlink() for step in (path, *list(path.parents)[: relative.count("/")]))


def sizes(parts: Sequence[Part]) -> int:
    """The bytes of all parts together."""
    return sum(part.size for part in parts)

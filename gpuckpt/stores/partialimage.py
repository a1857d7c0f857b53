"""Images under work as directories of this host: made beside, published whole.

An image under work is IMAGE.partial, 0700, locked by its maker. It becomes IMAGE by one rename after
everything in it has reached the disk; the presence of manifest.json in IMAGE means "complete". An
unlocked IMAGE.partial is what a killed maker left: worthless, removed.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
from pathlib import Path

from gpuckpt.model import manifest as manifests
from gpuckpt.model.errors import Busy, Refused
from gpuckpt.model.records import dataclass
from gpuckpt.system.files import rename_to_new

PARTIAL_SUFFIX = ".partial"


@dataclass(frozen=True, slots=True)
class PartialImage:
    """An image under work. Its maker holds `lock_fd` until it is published or discarded."""

    target: Path
    path: Path
    lock_fd: int
    secret: Path | None = None
    """Where the small files of an image that will be encrypted lie until they are."""

    @property
    def hidden(self) -> Path:
        """Where small files are written to."""
        return self.secret or self.path

    @property
    def criu(self) -> Path:
        """CRIU's files."""
        return self.hidden / "criu"

    @property
    def files(self) -> Path:
        """Captured files."""
        return self.hidden / "files"

    def discard(self) -> None:
        """Remove it: nothing of a failed dump stays."""
        shutil.rmtree(self.path, ignore_errors=True)
        with contextlib.suppress(OSError):
            os.close(self.lock_fd)

    def sync_parts(self) -> None:
        """Every file and directory is on the disk when this returns. Raises OSError."""
        sync_below(self.path)

    def publish(self, raw_manifest: bytes, signature: bytes = b"") -> None:
        """Write the manifest last, then rename. Raises OSError; the partial is then still there to be discarded."""
        self.write_manifest(raw_manifest, signature)
        self.put_in_place()

    def write_manifest(self, raw_manifest: bytes, signature: bytes = b"") -> None:
        """Write it to the disk, behind its signature where it has one. Raises OSError."""
        for name, content in ((manifests.SIGNATURE, signature), (manifests.NAME, raw_manifest)):
            if content:
                _write_synced(self.path / name, content)
        sync(self.path)

    def put_in_place(self) -> None:
        """Rename, once the manifest is written. Raises OSError, FileExistsError with the partial still there."""
        try:
            rename_to_new(self.path, self.target)
        except FileExistsError:
            words = "something of this name has appeared meanwhile"
            raise FileExistsError(errno.EEXIST, words, str(self.target)) from None
        try:
            sync(self.target.parent)
        except OSError:
            # Not known to be on the disk: no image. The tree has not ended yet, so nothing is lost.
            self.target.rename(self.path)
            raise
        os.close(self.lock_fd)


def sync_below(root: Path) -> None:
    """Every file and directory below `root`, itself included, is on the disk when this returns. Raises OSError."""
    for directory, _, names in os.walk(root):
        for name in names:
            sync(Path(directory) / name)
        sync(Path(directory))


def create_partial(target: Path) -> tuple[PartialImage, str]:
    """Make IMAGE.partial; returns it and a note when a killed maker's leftover was removed.

    Raises Busy when another gpuckpt makes it right now, Refused when IMAGE exists, OSError.
    """
    path = target.with_name(target.name + PARTIAL_SUFFIX)
    if os.path.lexists(target):
        raise Refused(f"{target} exists already", "choose another name, or remove it")
    note = remove_leftover(path)
    try:
        path.mkdir(mode=0o700)
    except FileExistsError:
        raise _being_made(path) from None
    partial = PartialImage(target, path, lock_partial(path))
    try:
        partial.criu.mkdir(mode=0o700)
    except OSError:
        partial.discard()
        raise
    return partial, note


def remove_leftover(path: Path) -> str:
    """Remove an unlocked partial, holding its lock, so that two makers cannot remove each other's; returns a note.

    Raises Busy where its maker lives, Refused where it is no directory, OSError.
    """
    if not os.path.lexists(path):
        return ""
    if path.is_symlink() or not path.is_dir():
        raise Refused(f"{path} is in the way and is no leftover of gpuckpt", "remove it")
    descriptor = lock_partial(path)
    try:
        shutil.rmtree(path)
    finally:
        os.close(descriptor)
    return f"removed {path}, which a killed dump had left"


def lock_partial(path: Path) -> int:
    """Lock a partial. Raises Busy when another maker has it, or has taken its place meanwhile."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        raise _being_made(path) from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        still_there = os.path.samestat(os.fstat(descriptor), path.stat(follow_symlinks=False))
    except (BlockingIOError, FileNotFoundError):
        still_there = False
    if not still_there:
        os.close(descriptor)
        raise _being_made(path)
    return descriptor


def _being_made(path: Path) -> Busy:
    return Busy(f"another gpuckpt is making {path} right now", "wait for it to end, or choose another name")


def _write_synced(path: Path, content: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def sync(path: Path) -> None:
    """A file, or the names in a directory, are on the disk when this returns. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

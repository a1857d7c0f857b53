"""Files that the tree has open: saved into the image while it stands still, compared with those here at a restore."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Literal

from gpuckpt.model.facts import OpenFile
from gpuckpt.model.manifest import OPEN, CapturedFile
from gpuckpt.model.records import dataclass
from gpuckpt.system.copying import copy_whole, same_bytes
from gpuckpt.system.files import open_plain

PREFIX = "open-"
FULL = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True, slots=True)
class SavedFile:
    """One file in the image."""

    captured: CapturedFile
    size: int
    """Bytes that were copied for it: none for a further name of a file that is there."""
    seconds: float


class NotSaved(Exception):
    """A file could not be saved: why, in words; nothing of it is left in the image."""

    def __init__(self, path: str, why: str, *, full: bool = False) -> None:
        super().__init__(f"{path} could not be saved into the image: {why}")
        self.path = path
        self.why = why
        self.full = full
        """The image's file system has no more room."""


def save(file: OpenFile, number: int, directory: Path, going_on: Callable[[], None]) -> SavedFile:
    """Copy one file of the tree, which stands still, into `directory`, made where it is missing.

    Raises NotSaved, and what `going_on` raises; OSError where the directory cannot be made.
    """
    began = time.monotonic()
    directory.mkdir(mode=0o700, exist_ok=True)
    target = directory / f"{PREFIX}{number}"
    try:
        with _reading(file) as source:
            _copy(source, target, going_on)
            # Somebody outside the tree writes into it: then nothing fits, neither its size nor its content.
            _require_unchanged(file, os.fstat(source))
            seen = os.fstat(source)
    except OSError as error:
        target.unlink(missing_ok=True)
        raise NotSaved(file.path, error.strerror or str(error), full=error.errno in FULL) from None
    except BaseException:
        target.unlink(missing_ok=True)
        raise
    captured = CapturedFile(
        path=file.path,
        part=f"{directory.name}/{target.name}",
        reason=OPEN,
        mode=stat.S_IMODE(seen.st_mode),
        uid=seen.st_uid,
        gid=seen.st_gid,
        mtime_ns=seen.st_mtime_ns,
    )
    return SavedFile(captured, seen.st_size, time.monotonic() - began)


def save_name(file: OpenFile, saved: SavedFile) -> SavedFile:
    """Another name of a file that is saved: its content is not copied again. Raises NotSaved."""
    began = time.monotonic()
    try:
        with _reading(file):
            captured = replace(saved.captured, path=file.path, linked_to=saved.captured.path)
    except OSError as error:
        raise NotSaved(file.path, error.strerror or str(error)) from None
    return SavedFile(captured, 0, time.monotonic() - began)


@contextlib.contextmanager
def _reading(file: OpenFile) -> Iterator[int]:
    """The tree's own file, and no other that has its name now. Raises OSError."""
    descriptor = open_plain(file.path)
    try:
        _require_unchanged(file, os.fstat(descriptor))
        yield descriptor
    finally:
        os.close(descriptor)


def _require_unchanged(file: OpenFile, seen: os.stat_result) -> None:
    if (seen.st_dev, seen.st_ino) != (file.device, file.inode):
        raise OSError(errno.ESTALE, "another file has its name now")
    if (seen.st_size, seen.st_mode, seen.st_uid, seen.st_gid, seen.st_mtime) != (
        file.size,
        file.mode,
        file.uid,
        file.gid,
        file.mtime,
    ):
        raise OSError(errno.ESTALE, "it was changed while the job stood still: others write into it")


def _copy(source: int, target: Path, going_on: Callable[[], None]) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    made = os.open(target, flags, 0o600)
    try:
        copy_whole(source, made, going_on)
    finally:
        os.close(made)


def compare(part: Path, path: str, going_on: Callable[[], None]) -> Literal["same", "grown", "other"] | None:
    """How the file at `path` compares with a part of the image; None where it cannot be read as a plain file."""
    try:
        here = open_plain(path)
    except OSError:
        return None
    try:
        saved = open_plain(part)
        try:
            return _compare(saved, here, going_on)
        finally:
            os.close(saved)
    except OSError:
        return None
    finally:
        os.close(here)


def _compare(saved: int, here: int, going_on: Callable[[], None]) -> Literal["same", "grown", "other"]:
    size, now = os.fstat(saved).st_size, os.fstat(here).st_size
    if now < size or not same_bytes(saved, here, size, going_on=going_on):
        return "other"
    return "same" if now == size else "grown"

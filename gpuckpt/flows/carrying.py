"""Files of a job that moves: what the other host must have, what is compared there, and directories that go along."""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from gpuckpt.checks.filechoice import KERNEL, writes
from gpuckpt.checks.gpu_restore import is_driver_library
from gpuckpt.model.facts import OpenFile
from gpuckpt.model.migration import Directory
from gpuckpt.stores import directory as images

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from gpuckpt.model.facts import Tree


def digests(tree: Tree, carried: Iterable[OpenFile], going_on: Callable[[], None]) -> dict[str, str]:
    """BLAKE3 of every file that the tree only reads and that no build-id names. Raises what `going_on` raises.

    What it writes to is carried, or compared by its size as it is at the dump.
    """
    left = {file.path for file in carried}
    found = {}
    for file in tree.files:
        if file.path in left or file.build_id is not None or not _is_compared(file):
            continue
        with contextlib.suppress(OSError):
            found[file.path] = images.digest(Path(file.path), going_on)
    return found


def _is_compared(file: OpenFile) -> bool:
    ordinary = stat.S_ISREG(file.mode) and not file.deleted and not file.path.startswith(KERNEL)
    return ordinary and not writes(file) and not is_driver_library(file.path)


def compare(digests_there: Mapping[str, str], going_on: Callable[[], None]) -> dict[str, bool]:
    """Path -> whether the file of this host has the same bytes; those that are not here are left out."""
    found = {}
    for path, digest in digests_there.items():
        with contextlib.suppress(OSError):
            found[path] = images.digest(Path(path), going_on) == digest
    return found


def directories(tree: Tree, carried: Iterable[OpenFile]) -> tuple[Directory, ...]:
    """The directories that the tree has open or works in, and those of carried files, with all above them."""
    wanted = {file.path for file in tree.files if stat.S_ISDIR(file.mode) and not file.deleted}
    wanted |= {str(PurePosixPath(file.path).parent) for file in carried}
    every = {str(one) for path in wanted for one in (PurePosixPath(path), *PurePosixPath(path).parents)}
    seen = (_seen(path) for path in sorted(every) if not f"{path}/".startswith(KERNEL))
    return tuple(one for one in seen if one is not None)


def _seen(path: str) -> Directory | None:
    try:
        status = os.lstat(path)
    except OSError:
        return None
    if not stat.S_ISDIR(status.st_mode):
        return None
    return Directory(path, stat.S_IMODE(status.st_mode), status.st_uid, status.st_gid, status.st_mtime_ns)


def as_if_made(here: Mapping[str, OpenFile | None], coming: Sequence[Directory]) -> dict[str, OpenFile | None]:
    """What will be here once the missing directories are made."""
    made = {
        one.path: OpenFile(
            one.path, (), 0, stat.S_IFDIR | one.mode, one.mtime_ns / 1e9, 0, 0, 2, 0, uid=one.uid, gid=one.gid
        )
        for one in coming
        if here.get(one.path) is None and not os.path.lexists(one.path)
    }
    return {**here, **{path: found for path, found in made.items() if path in here}}


def make(coming: Sequence[Directory]) -> list[str]:
    """Make those that are missing, with their mode and owner; returns them, outer ones first. Raises OSError.

    No link is followed to make one: its parent is either there as it was judged, or was made just now.
    """
    made: list[str] = []
    try:
        for one in sorted(coming, key=lambda one: one.path):
            if not os.path.lexists(one.path):
                os.mkdir(one.path, 0o700)  # noqa: PTH102 - a path as text
                made.append(one.path)
                os.chown(one.path, one.uid, one.gid, follow_symlinks=False)
                os.chmod(one.path, one.mode)  # noqa: PTH101 - just made
    except BaseException:
        unmake(made)
        raise
    return made


def unmake(made: Sequence[str]) -> None:
    """Remove directories that were made and are still empty."""
    for path in reversed(made):
        with contextlib.suppress(OSError):
            os.rmdir(path)  # noqa: PTH106 - a path as text

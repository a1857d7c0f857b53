"""Files of a job that moves: what the other host must have, what is compared there, and directories that go along."""

from __future__ import annotations

import contextlib
import os
import stat
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from gpuckpt.checks.check import listing, size
from gpuckpt.checks.filechoice import KERNEL, writes
from gpuckpt.checks.gpu_restore import is_driver_library
from gpuckpt.flows import gather
from gpuckpt.model.facts import OpenFile
from gpuckpt.model.migration import Directory
from gpuckpt.model.report import Finding
from gpuckpt.stores import directory as images

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from gpuckpt.flows.workdirs import Below
    from gpuckpt.model.facts import Tree
    from gpuckpt.model.manifest import Manifest
    from gpuckpt.model.migration import Terms


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


def with_places(terms: Terms, tree: Tree, carried: Iterable[OpenFile], below: Sequence[Below]) -> Terms:
    """The terms with the directories and links that go along."""
    links = tuple(link for one in below for link in one.links)
    inner = {path for one in below for path in one.directories}
    inner |= {str(PurePosixPath(link.path).parent) for link in links}
    return replace(terms, directories=_directories(tree, carried, inner), links=links)


def _directories(tree: Tree, carried: Iterable[OpenFile], inner: set[str]) -> tuple[Directory, ...]:
    """The directories that the tree has open or works in, and those of carried files, with all above them."""
    wanted = {file.path for file in tree.files if stat.S_ISDIR(file.mode) and not file.deleted}
    wanted |= {str(PurePosixPath(file.path).parent) for file in carried} | inner
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


def room(draft: Manifest, image_parent: Path) -> tuple[Finding, ...]:
    """Whether the files that will be put in place here fit, beside the image where it lies on the same disk.

    A file that has the same size here may be the same: that is known when its bytes are here.
    """
    taken = {file.path: file.blocks_bytes for file in draft.tree.files}
    sizes = {one.path: one.size for one in draft.parts}
    needs: dict[int, int] = {}
    places: dict[int, Path] = {}
    for captured in draft.captured:
        with contextlib.suppress(OSError):
            if os.lstat(captured.path).st_size == sizes[captured.part]:
                continue
        place = _nearest(captured.path)
        device = place.stat().st_dev
        places.setdefault(device, place)
        needs[device] = needs.get(device, 0) + taken.get(captured.path, 0)
    for device in needs.keys() & {_nearest(str(image_parent / "image")).stat().st_dev}:
        needs[device] *= 2
    if not needs:
        return ()
    free = {device: gather.free_bytes(place) for device, place in places.items()}
    short = [
        f"{size(left)} free in {places[device]}, {size(needs[device])} needed"
        for device, left in free.items()
        if left is not None and left < needs[device]
    ]
    expected = "room for the files that go along"
    if not short:
        return (Finding("files-room", "pass", "block", expected, size(sum(needs.values()))),)
    hint = "make room there, or let fewer files go along: --carry-files GLOB"
    return (Finding("files-room", "fail", "block", expected, listing(short), hint),)


def _nearest(path: str) -> Path:
    """The nearest directory above it that exists."""
    return next(one for one in Path(path).parents if one.is_dir())

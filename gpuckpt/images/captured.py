"""CRIU's link-remap files: saved while the tree stands still, put back before CRIU restores.

The tree has a file open whose name was deleted while another name of it stays (every POSIX semaphore is
one). CRIU makes a temporary hard link, which it deletes when the tree goes on, and
which no other host has. CRIU counts their names from 1 in every dump: another job's may stand in the way.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from gpuckpt.images import criuformat
from gpuckpt.model.errors import DumpFailed, RestoreFailed
from gpuckpt.model.manifest import LINK_REMAP, CapturedFile
from gpuckpt.system.files import Placed, open_plain, placed

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from gpuckpt.model.facts import Tree

CHUNK_BYTES = 1 << 20


def deleted_files(tree: Tree) -> dict[str, set[tuple[int, int]]]:
    """Former name -> (device, inode) of every deleted file of the tree."""
    found: dict[str, set[tuple[int, int]]] = {}
    for file in tree.files:
        if file.deleted:
            found.setdefault(file.path, set()).add((file.device, file.inode))
    return found


def save_link_remaps(
    criu_directory: Path, files_directory: Path, known: Mapping[str, Collection[tuple[int, int]]]
) -> tuple[CapturedFile, ...]:
    """Copy every link-remap file of a finished capture into `files_directory`.

    `known` is what `deleted_files` found: a link that leads elsewhere was exchanged by somebody else.
    Raises OSError, ImageCorrupt, DumpFailed.
    """
    saved: list[CapturedFile] = []
    for remap in criuformat.link_remaps(criu_directory):
        if any(one.path == remap.path for one in saved):
            continue
        files_directory.mkdir(mode=0o700, exist_ok=True)
        target = files_directory / str(len(saved))
        saved.append(_save(Path(remap.path), target, files_directory.name, known.get(remap.original, ())))
    return tuple(saved)


def _save(source: Path, target: Path, directory_name: str, known: Collection[tuple[int, int]]) -> CapturedFile:
    descriptor = open_plain(source)
    with os.fdopen(descriptor, "rb") as content:
        seen = os.fstat(descriptor)
        if known and (seen.st_dev, seen.st_ino) not in known:
            raise DumpFailed(f"{source} is not the job's file", f"see who else writes into {source.parent}")
        made = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with os.fdopen(made, "wb") as out:
            shutil.copyfileobj(content, out)
    return CapturedFile(
        path=str(source),
        part=f"{directory_name}/{target.name}",
        reason=LINK_REMAP,
        mode=seen.st_mode & 0o7777,
        uid=seen.st_uid,
        gid=seen.st_gid,
        mtime_ns=seen.st_mtime_ns,
        linked_to=_other_name(source, seen),
    )


def _other_name(source: Path, seen: os.stat_result) -> str:
    """Another name of the same file in its directory: a semaphore's public name."""
    for entry in os.scandir(source.parent):
        if entry.inode() == seen.st_ino and entry.name != source.name and not entry.name.startswith("link_remap."):
            return entry.path
    return ""


def put_back(root: Path, captured: Sequence[CapturedFile]) -> list[Placed]:
    """Put the captured files where CRIU will look for them; returns what was made.

    A file that is there already must be the dump's own. Where the public name still stands for the same
    content the file becomes a hard link to it, so that others who open it by name share it.
    Raises OSError, and RestoreFailed where another job's file is in the way; then nothing of it stays.
    """
    made: list[Placed] = []
    try:
        for one in captured:
            _put_back(root / one.part, one, made)
    except (OSError, RestoreFailed):
        remove(made)
        raise
    return made


def _put_back(source: Path, one: CapturedFile, made: list[Placed]) -> None:
    target = Path(one.path)
    if os.path.lexists(target):
        if not _is_the_same(target, source, one):
            raise RestoreFailed(
                f"{target} is another job's file, and this image needs its own there",
                f"where no CRIU works on that job any more, remove it: rm {target}",
            )
        return
    public = Path(one.linked_to) if one.linked_to else None
    if public is not None and _is_the_same(public, source, one, whenever=True):
        target.hardlink_to(public)
        _note(target, made)
        return
    _copy(source, target, one, made)
    if public is not None and not os.path.lexists(public):
        public.hardlink_to(target)
        _note(public, made)


def _note(path: Path, made: list[Placed]) -> None:
    now = placed(path)
    if now is not None:
        made.append(now)


def _is_the_same(path: Path, source: Path, one: CapturedFile, *, whenever: bool = False) -> bool:
    """The content, owner and mode of the dump's, and its time: equal contents alone are no proof of the same job.

    A public name is used by others, who change the time: `whenever`.
    """
    try:
        descriptor = open_plain(path)
    except OSError:
        return False
    with os.fdopen(descriptor, "rb") as here, source.open("rb") as there:
        seen = os.fstat(descriptor)
        if (seen.st_uid, seen.st_gid, seen.st_mode & 0o7777) != (one.uid, one.gid, one.mode):
            return False
        if not whenever and seen.st_mtime_ns != one.mtime_ns:
            return False
        while True:
            ours, theirs = here.read(CHUNK_BYTES), there.read(CHUNK_BYTES)
            if ours != theirs or not ours:
                return ours == theirs


def _copy(source: Path, target: Path, one: CapturedFile, made: list[Placed]) -> None:
    descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as out, source.open("rb") as content:
            shutil.copyfileobj(content, out)
            out.flush()
            os.fchown(descriptor, one.uid, one.gid)
            os.fchmod(descriptor, one.mode)
            os.utime(descriptor, ns=(one.mtime_ns, one.mtime_ns))
    finally:
        _note(target, made)


def remove(places: Iterable[Placed]) -> None:
    """Take back what was put back: after a failed restore nothing stays."""
    for one in places:
        one.remove()


def litter(captured: Sequence[CapturedFile]) -> tuple[Placed, ...]:
    """CRIU's own link-remap files, which a dump that ends the tree leaves: the image has their content."""
    found = (placed(one.path) for one in captured if Path(one.path).name.startswith("link_remap."))
    return tuple(one for one in found if one is not None)

"""Files that must travel with the image: saved while the tree stands still, put back before CRIU restores.

Today these are CRIU's link-remap files: a deleted name of a file that has another name still (every
POSIX semaphore is one). CRIU makes a temporary hard link, which it deletes when the tree goes on, and
which no other host has.
"""

from __future__ import annotations

import contextlib
import filecmp
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from gpuckpt.images import criuformat
from gpuckpt.model.manifest import CapturedFile

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

REASON = "link-remap"


def save_link_remaps(criu_directory: Path, files_directory: Path) -> tuple[CapturedFile, ...]:
    """Copy every link-remap file of a finished capture into `files_directory`. Raises OSError, ImageCorrupt."""
    saved: list[CapturedFile] = []
    for remap in criuformat.link_remaps(criu_directory):
        if any(one.path == remap.path for one in saved):
            continue
        files_directory.mkdir(mode=0o700, exist_ok=True)
        saved.append(_save(Path(remap.path), files_directory / str(len(saved)), files_directory.name))
    return tuple(saved)


def _save(source: Path, target: Path, directory_name: str) -> CapturedFile:
    shutil.copyfile(source, target)
    target.chmod(0o600)
    seen = source.stat()
    return CapturedFile(
        path=str(source),
        part=f"{directory_name}/{target.name}",
        reason=REASON,
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


def put_back(root: Path, captured: Sequence[CapturedFile]) -> list[Path]:
    """Put the captured files where CRIU will look for them; returns what was made. Raises OSError.

    A file that is there already stays: it is the dump's own. Where the public name still stands for
    the same content the file becomes a hard link to it, so that others who open it by name share it.
    """
    made: list[Path] = []
    try:
        for one in captured:
            made += _put_back(root / one.part, one)
    except OSError:
        remove(made)
        raise
    return made


def _put_back(source: Path, one: CapturedFile) -> list[Path]:
    target = Path(one.path)
    if target.exists():
        return []
    public = Path(one.linked_to) if one.linked_to else None
    if public is not None and public.exists() and filecmp.cmp(public, source, shallow=False):
        os.link(public, target)
        return [target]
    _copy(source, target, one)
    if public is not None and not public.exists():
        os.link(target, public)
    return [target]


def _copy(source: Path, target: Path, one: CapturedFile) -> None:
    descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as out, source.open("rb") as content:
        shutil.copyfileobj(content, out)
        os.fchown(out.fileno(), one.uid, one.gid)
        os.fchmod(out.fileno(), one.mode)
    os.utime(target, ns=(one.mtime_ns, one.mtime_ns))


def remove(paths: Iterable[Path]) -> None:
    """Take back what was put back: after a failed restore nothing stays."""
    for path in paths:
        with contextlib.suppress(OSError):
            path.unlink()


def remove_litter(captured: Sequence[CapturedFile]) -> None:
    """Remove CRIU's own link-remap files after a dump that ended the tree: the image has their content."""
    remove(Path(one.path) for one in captured if Path(one.path).name.startswith("link_remap."))

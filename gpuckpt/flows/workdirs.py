"""What lies below the working directories of a tree that moves: files, directories and links that go along.

Walked is what belongs to the job: never a directory that every host has (`/`, `/srv`, `/var/lib`, a home directory
itself), nor anything below those of the system; never through a link, and never into another file system.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import stat
from dataclasses import dataclass, field, replace
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

from gpuckpt.checks.check import size
from gpuckpt.checks.filechoice import KERNEL, means
from gpuckpt.model.errors import Refused
from gpuckpt.model.facts import OpenFile
from gpuckpt.model.manifest import SET_ID
from gpuckpt.model.migration import FILES, SEED, Link
from gpuckpt.model.report import Finding
from gpuckpt.stores.partialimage import PARTIAL_SUFFIX

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from gpuckpt.model.facts import Tree

SYSTEM = (
    *("/bin", "/boot", "/dev", "/etc", "/lib", "/lib32", "/lib64", "/run", "/sbin", "/usr"),
    *(one.rstrip("/") for one in KERNEL),
)
"""Neither these nor what lies below them."""

SHARED = ("/home", "/var")
"""Neither these nor what lies directly in them."""

BLOCK = 512
"""What st_blocks counts."""

MOST_ENTRIES = 20_000
"""Each is compared, sent and put in place for itself: more are a data set, and better copied beforehand."""


@dataclass(slots=True)
class Below:
    """What goes along from below one working directory."""

    path: str
    why_not: str = ""
    """It is not walked."""
    files: list[OpenFile] = field(default_factory=list)
    directories: list[str] = field(default_factory=list)
    links: list[Link] = field(default_factory=list)
    left: int = 0
    """Sockets, devices, and files that run with the rights of their owner: they stay."""

    @property
    def bytes(self) -> int:
        """Of all files, as they are read."""
        return sum(file.size for file in self.files)

    def to_json(self) -> dict[str, Any]:
        """For the plan."""
        if self.why_not:
            return {"path": self.path, "not_walked": self.why_not}
        counts = {"files": len(self.files), "directories": len(self.directories), "links": len(self.links)}
        return {"path": self.path, **counts, "bytes": self.bytes, "left": self.left}

    def __str__(self) -> str:
        if self.why_not:
            return f"{self.path} is not walked: {self.why_not}"
        left = f"; {self.left} sockets, devices or setuid files stay" if self.left else ""
        counts = f"{len(self.files)} files, {len(self.directories)} directories, {len(self.links)} links"
        return f"{self.path}: {counts}, {size(self.bytes)}{left}"


def look(tree: Tree, words: Sequence[str], image: str, going_on: Callable[[], None]) -> tuple[Below, ...]:
    """What `--carry-files` means below each working directory, beside the files that the tree has open.

    `image` is where an image of the tree grows: nothing of that goes along. Raises Refused for too many files, and
    what `going_on` raises.
    """
    if not any(word not in ("none", "writable") for word in words):
        return ()
    skipped = {file.path for file in tree.files if not stat.S_ISDIR(file.mode)}
    skipped |= {f"{image}{seed}{partial}" for seed in ("", SEED, FILES) for partial in ("", PARTIAL_SUFFIX)}
    uids = {process.uid for process in tree.processes}
    found = []
    for path, uses in _tops(tree, uids):
        below = Below(path, why_not(path, uids))
        if not below.why_not:
            _walk(below, uses, words, skipped, going_on)
        found.append(below)
    return tuple(found)


def _tops(tree: Tree, uids: set[int]) -> Iterator[tuple[str, str]]:
    """Working directories that lie in no other one, and who works there."""
    of = {file.path: use for file in tree.files for use in file.uses if use.endswith(" cwd") and not file.deleted}
    for path, use in sorted(of.items()):
        if not any(str(one) in of and not why_not(str(one), uids) for one in PurePosixPath(path).parents):
            yield path, f"{use.partition(' ')[0]} working directory"


def why_not(path: str, uids: Iterable[int]) -> str:
    """Why a working directory is not walked; '' for one that is the job's own."""
    within = {path, *(str(one) for one in PurePosixPath(path).parents)}
    if system := sorted(within & set(SYSTEM)):
        return f"{system[0]} is the system's"
    parent = str(PurePosixPath(path).parent)
    if parent == "/" or parent in SHARED:
        return "every host has its own"
    if path in {home for uid in uids if (home := _home(uid))}:
        return "it is a home directory itself"
    return ""


def _home(uid: int) -> str:
    with contextlib.suppress(KeyError):
        return pwd.getpwuid(uid).pw_dir
    return ""


def _walk(below: Below, use: str, words: Sequence[str], skipped: set[str], going_on: Callable[[], None]) -> None:
    device = os.lstat(below.path).st_dev
    # fwalk goes by descriptors: what is exchanged for a link meanwhile is not followed.
    for root, directories, files, at in os.fwalk(below.path, follow_symlinks=False):
        going_on()
        inner = []
        for name in sorted((*directories, *files)):
            path = f"{root}/{name}"
            if path in skipped:
                continue
            with contextlib.suppress(FileNotFoundError):
                seen = os.stat(name, dir_fd=at, follow_symlinks=False)
                if stat.S_ISDIR(seen.st_mode) and seen.st_dev == device:
                    inner.append(name)
                _take(below, path, seen, use, words, at)
        directories[:] = inner
        if len(below.files) + len(below.directories) + len(below.links) > MOST_ENTRIES:
            raise Refused(
                f"the working directory {below.path} holds more than {MOST_ENTRIES} files that would go along",
                "copy it there yourself (rsync -aHR), or name what is to go along: --carry-files GLOB",
            )


def _take(below: Below, path: str, seen: os.stat_result, use: str, words: Sequence[str], at: int) -> None:
    file = _file(path, seen, use)
    if stat.S_ISDIR(seen.st_mode):
        if "all" in words:
            below.directories.append(path)
    elif not any(means(word, file) for word in words):
        return
    elif stat.S_ISLNK(seen.st_mode):
        target = os.readlink(PurePosixPath(path).name, dir_fd=at)
        below.links.append(Link(path, target, seen.st_uid, seen.st_gid, seen.st_mtime_ns))
    elif stat.S_ISREG(seen.st_mode) and not seen.st_mode & SET_ID:
        below.files.append(file)
    else:
        below.left += 1


def _file(path: str, seen: os.stat_result, use: str) -> OpenFile:
    return OpenFile(
        *(path, (use,), seen.st_size, seen.st_mode, seen.st_mtime, seen.st_dev, seen.st_ino, seen.st_nlink),
        blocks_bytes=seen.st_blocks * BLOCK,
        uid=seen.st_uid,
        gid=seen.st_gid,
    )


def with_files(tree: Tree, below: Iterable[Below]) -> Tree:
    """The tree, as if it had these files open as well."""
    return replace(tree, files=(*tree.files, *(file for one in below for file in one.files)))


def finding(below: Iterable[Below]) -> tuple[Finding, ...]:
    """What goes along, for whoever reads the checks."""
    words = [str(one) for one in below]
    expected = "what --carry-files means below the working directories of the tree"
    return (Finding("working-directories", "pass", "note", expected, "; ".join(words)),) if words else ()

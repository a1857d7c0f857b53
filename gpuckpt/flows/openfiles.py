"""Open files around a dump and a restore: chosen and saved; compared, and changed so that they can be changed back."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpuckpt import checks
from gpuckpt.images import captured as linkremaps
from gpuckpt.images import openfiles
from gpuckpt.model.errors import DumpFailed, RestoreFailed
from gpuckpt.model.manifest import LINK_REMAP, OPEN
from gpuckpt.owner import runs
from gpuckpt.system import procfs
from gpuckpt.system.filechanges import Attributes, FileChanges, Judged, Name

if TYPE_CHECKING:
    from gpuckpt.checks.facts import CapturedHere
    from gpuckpt.model.facts import OpenFile, Tree
    from gpuckpt.model.requests import DumpRequest
    from gpuckpt.owner.runs import Run
    from gpuckpt.stores.directory import Image
    from gpuckpt.system.files import Placed

CHANGED = "has changed since it was compared with the image's"
LEAVE_OUT = "repair that, or leave it out of --capture-files; the job's files are as they were"


@dataclass
class SavedFiles:
    """What a dump has put into files/ of the tree's open files."""

    files: list[openfiles.SavedFile] = field(default_factory=list)
    left: dict[str, str] = field(default_factory=dict)
    """Those that should be there and are not: path -> why."""

    @property
    def seconds(self) -> float:
        """How long it took."""
        return sum(one.seconds for one in self.files)

    def in_words(self) -> list[dict[str, Any]]:
        """For the report."""
        return [{"path": one.captured.path, "bytes": one.size, "seconds": one.seconds} for one in self.files]


def save(request: DumpRequest, tree: Tree, directory: Path, going_on: Callable[[], None]) -> SavedFiles:
    """Save what this dump shall save; the tree stands still.

    What was asked for must be saved: else raises DumpFailed. What is saved unasked is left out where that fails.
    Raises OSError, and what `going_on` raises.
    """
    choice = checks.chosen_files(request, tree)
    saved = SavedFiles(left=dict(choice.left))
    full = ""
    inodes: dict[tuple[int, int], openfiles.SavedFile] = {}
    for number, file in enumerate(choice.files):
        first = inodes.get((file.device, file.inode))
        if full and first is None:
            saved.left[file.path] = full
            continue
        try:
            now = openfiles.save_name(file, first) if first else openfiles.save(file, number, directory, going_on)
            inodes.setdefault((file.device, file.inode), now)
            saved.files.append(now)
        except openfiles.NotSaved as trouble:
            if choice.asked:
                raise DumpFailed(str(trouble), "make room for it" if trouble.full else LEAVE_OUT) from None
            saved.left[file.path] = trouble.why
            full = trouble.why if trouble.full else ""
    return saved


def look(image: Image) -> dict[str, OpenFile | None]:
    """What lies here under the names of captured files; None where nothing does."""
    return {one.path: procfs.file_here(one.path) for one in image.manifest.captured if one.reason == OPEN}


def compare(image: Image, going_on: Callable[[], None]) -> dict[str, CapturedHere]:
    """How captured files that are here compare with the image's. Raises what `going_on` raises."""
    found = {
        captured.path: openfiles.compare(image.part(captured.part), captured.path, going_on)
        for captured in image.manifest.captured
        if captured.reason == OPEN and os.path.lexists(captured.path)
    }
    return {path: how for path, how in found.items() if how is not None}


@dataclass
class FilesInPlace:
    """What a restore puts back and changes on this host: kept when the tree comes up, else taken back."""

    image: Image
    run: Run
    going_on: Callable[[], None]
    """May raise; called between pieces."""
    seen: Mapping[str, OpenFile | None]
    """The captured files here as they were when they were compared with the image's."""
    alone: bool = False
    """Files of CRIU's own making can get into the way of another restore from this image."""
    shared: bool = False
    """The tree is one of several: files of this host are theirs as well."""
    elsewhere: Callable[[str], bool] = lambda _: False
    """Paths at which the tree finds files of its own, not this host's."""
    done: list[dict[str, Any]] = field(default_factory=list)
    """For the report: path, what was done, and where the old file or its end lies."""
    _lock: int | None = None
    _remaps: list[Placed] = field(default_factory=list)
    _changes: FileChanges = field(init=False)

    def __post_init__(self) -> None:
        self._changes = FileChanges(self.run.directory, self.run.id, self.going_on)

    def put(self, acts: Sequence[checks.FileAct]) -> None:
        """Do it all. Raises RestoreFailed, OSError and what `going_on` raises; nothing is taken back by that.

        Another restore that needs the same names waits until `close`.
        """
        captured = [one for one in self.image.manifest.captured if not self.elsewhere(one.path)]
        if not captured and not acts and not self.alone:
            return
        self._lock = runs.alone_with_captured_files(self.going_on)
        self._require_unchanged(acts)
        self._remaps = linkremaps.put_back(self.image.root, [one for one in captured if one.reason == LINK_REMAP])
        for act in acts:
            if act.kind == "cut" and act.link_to:
                continue  # done, under its other name
            try:
                kept = self._change(act)
            except OSError as error:
                raise _not_changed(act, error) from None
            self.done.append({"path": act.file.path, "act": act.kind, "kept_as": kept})

    def _require_unchanged(self, acts: Sequence[checks.FileAct]) -> None:
        """Before we came in another restore, or anybody, may have changed what was judged, or was found to be right.

        What the tree only appends to, or shares with the one it is a clone of, others may write to all the while.
        """
        if self.shared:
            return
        appended = {file.path for file in self.image.manifest.tree.files if checks.appends_only(file)}
        free = appended - {act.file.path for act in acts}
        now = look(self.image)
        for path in (path for path, seen in self.seen.items() if _identity(now[path]) != _identity(seen)):
            if path not in free or now[path] is None:
                raise RestoreFailed(f"{path} {CHANGED}", "repeat the command: it looks again")

    def _change(self, act: checks.FileAct) -> str | None:
        path, captured, here = act.file.path, act.captured, act.here
        if here is not None and act.kind == "cut":
            mtime_ns = captured.mtime_ns if captured else round(act.file.mtime * 1_000_000_000)
            return self._changes.cut(path, act.file.size, mtime_ns, Judged(here.device, here.inode, here.size))
        assert captured is not None  # noqa: S101 - fileplan puts and replaces nothing else
        source = self._name(act.link_to) if act.link_to else self.image.part(captured.part)
        attributes = Attributes(captured.mode, captured.uid, captured.gid, captured.mtime_ns)
        if here is not None:
            return self._changes.replace(path, source, attributes, Judged(here.device, here.inode, here.size))
        self._changes.put(path, source, attributes)
        return None

    def _name(self, path: str) -> Name:
        """A file that stands: one that we made just now, or one that was here and stays."""
        here = self.seen.get(path)
        made = self._changes.made.get(path) or (here and (here.device, here.inode))
        assert made  # noqa: S101 - fileplan links to nothing else
        return Name(path, *made)

    def keep(self) -> list[str]:
        """The tree has them open: from here on nobody takes them back. Returns what a person must know."""
        self._changes.keep()
        self.close()
        return [_WORDS[one["act"]].format_map(one) for one in self.done]

    def take_back(self) -> list[str]:
        """All is as before; returns what could not be taken back, in words."""
        linkremaps.remove(self._remaps)
        return self._changes.undo()

    def close(self) -> None:
        """Let others."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _identity(file: OpenFile | None) -> tuple[float | None, ...] | None:
    """Which file it is, and whether it was written to. Not its blocks: they change when it goes to the disk."""
    return None if file is None else (file.device, file.inode, file.size, file.mtime, file.mode, file.uid, file.gid)


def _not_changed(act: checks.FileAct, error: OSError) -> RestoreFailed:
    path = act.file.path
    if error.errno != errno.EBUSY:
        return RestoreFailed(f"{path} cannot be put in place: {error.strerror}", f"look at it: ls -l {path}")
    instead = ", or say --overwrite-files instead of --truncate-files" if act.captured is not None else ""
    return RestoreFailed(
        f"{path} cannot be cut: {error.strerror}, and what is written to it meanwhile would be lost",
        f"end what has it open (`fuser -v {path}` shows it){instead}",
    )


_WORDS: Mapping[str, str] = {
    "put": "{path} was missing and is put back from the image",
    "replace": "{path} is put back from the image; the one that was there is {kept_as}",
    "cut": "{path} is cut to what it was at the dump; what came later is in {kept_as}",
}

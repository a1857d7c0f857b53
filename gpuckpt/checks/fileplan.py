"""What a restore does to files: which are put back, replaced or cut, and which it leaves as they are.

A file that is there is never touched unasked. One that the tree only appends to may have grown: CRIU does
not mind, and its later lines are somebody's.
"""

from __future__ import annotations

import stat
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Literal

from gpuckpt.checks.facts import RestoreFacts, has_own_place
from gpuckpt.checks.filechoice import KERNEL, appends_only, writes
from gpuckpt.checks.gpu_restore import is_driver_library
from gpuckpt.model.facts import OpenFile
from gpuckpt.model.manifest import LINK_REMAP, OPEN, CapturedFile, Manifest
from gpuckpt.model.records import dataclass

Change = Literal["same", "grown", "other"]


@dataclass(frozen=True, slots=True)
class FileAct:
    """One file that the restore changes."""

    kind: Literal["put", "replace", "cut"]
    file: OpenFile
    """As it was at the dump."""
    captured: CapturedFile | None
    here: OpenFile | None
    """As it is now; None where it is missing."""
    link_to: str = ""
    """Another name of the same file, which stands (or is cut) by then: this becomes a hard link to it."""

    @property
    def words(self) -> str:
        """What will be done, for a person."""
        path = self.file.path
        if self.link_to and self.kind == "cut":
            return f"{path} is the same file as {self.link_to}"
        if self.link_to:
            return f"{path} is {'moved aside and ' if self.here else ''}linked to {self.link_to} again"
        return {
            "put": f"{path} is put back from the image",
            "replace": f"{path} is moved aside and put back from the image",
            "cut": f"{path} is cut to {self.file.size} bytes, the rest kept beside it",
        }[self.kind]


def captured_open(manifest: Manifest) -> dict[str, CapturedFile]:
    """Path -> captured file, of those that the tree had open."""
    return {captured.path: captured for captured in manifest.captured if captured.reason == OPEN}


def needed(facts: RestoreFacts) -> Iterator[OpenFile]:
    """Files that must lie here: not deleted ones (in the image), /proc's and /sys's, the driver's."""
    remapped = {captured.path for captured in facts.manifest.captured if captured.reason == LINK_REMAP}
    for file in facts.tree.files:
        skip = file.deleted or file.path in remapped or is_driver_library(file.path)
        if not skip and not file.path.startswith(KERNEL) and not has_own_place(facts, file.path):
            yield file


def pairs(facts: RestoreFacts) -> Iterator[tuple[OpenFile, OpenFile]]:
    """(at the dump, here) for every needed file that is here."""
    for file in needed(facts):
        here = facts.files_here.get(file.path)
        if here is not None:
            yield file, here


def is_program(file: OpenFile) -> bool:
    """CRIU compares its build-id too."""
    return file.build_id is not None or any(use.endswith(" exe") for use in file.uses)


def file_acts(facts: RestoreFacts) -> tuple[FileAct, ...]:
    """Everything that this restore would do to files, as it was asked to. A clone changes none: others may use them."""
    if facts.request.clone:
        return ()
    captured = captured_open(facts.manifest)
    found = (_act(facts, file, captured) for file in needed(facts) if stat.S_ISREG(file.mode))
    acts = {act.file.path: act for act in found if act is not None}
    return tuple(_linked(facts, acts, captured))


def _linked(
    facts: RestoreFacts, acts: Mapping[str, FileAct], all_captured: Mapping[str, CapturedFile]
) -> Iterator[FileAct]:
    """Names of one file: whichever stays, or else the first that is made, is what the others are linked to."""
    cut: dict[tuple[int, int], str] = {}
    standing = {
        captured.part: path
        for path, captured in all_captured.items()
        if facts.files_here.get(path) is not None and (path not in acts or acts[path].kind == "cut")
    }
    for path, act in acts.items():
        if act.kind == "cut" and act.here is not None:
            first = cut.setdefault((act.here.device, act.here.inode), path)
            yield act if first == path else replace(act, link_to=first)
        elif act.captured is not None:
            yield replace(act, link_to=standing.get(act.captured.part, ""))
            standing.setdefault(act.captured.part, path)


def _act(facts: RestoreFacts, file: OpenFile, all_captured: Mapping[str, CapturedFile]) -> FileAct | None:
    captured, here = all_captured.get(file.path), facts.files_here.get(file.path)
    if here is None:
        missing = captured is not None and file.path in facts.files_here
        return FileAct("put", file, captured, None) if missing else None
    change = changed(facts, file, here, captured)
    if change == "grown" and facts.request.truncate_files and can_be_cut(file, captured):
        return FileAct("cut", file, captured, here)
    if change != "same" and facts.request.overwrite_files and captured is not None:
        return FileAct("replace", file, captured, here)
    return None


def changed(facts: RestoreFacts, file: OpenFile, here: OpenFile, captured: CapturedFile | None) -> Change:
    """What became of a regular file. Without the image's copy only its size tells."""
    if captured is not None:
        return "other" if severed(facts, here, captured) else facts.captured_here.get(file.path, "other")
    return "same" if here.size == file.size else "grown" if here.size > file.size else "other"


def severed(facts: RestoreFacts, here: OpenFile, captured: CapturedFile) -> bool:
    """It was a further name of a file of the tree, and is a file of its own now."""
    first = facts.files_here.get(captured.linked_to)
    return first is not None and (first.device, first.inode) != (here.device, here.inode)


def can_be_cut(file: OpenFile, captured: CapturedFile | None) -> bool:
    """What the tree only reads grew by other hands: without the image's copy nobody may cut that."""
    return not is_program(file) and (captured is not None or writes(file))


def stays_as_it_is(file: OpenFile) -> bool:
    """Unlike the dump's it does no harm."""
    return appends_only(file)

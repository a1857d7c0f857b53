"""What a restore does to files: which are put back, replaced or cut, and which it leaves as they are.

A file that is there is never touched unasked. One that the tree only appends to may have grown: CRIU does
not mind, and its later lines are somebody's.
"""

from __future__ import annotations

import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from gpuckpt.checks.facts import RestoreFacts
from gpuckpt.checks.filechoice import KERNEL, appends_only, writes
from gpuckpt.checks.gpu_restore import is_driver_library
from gpuckpt.model.facts import OpenFile
from gpuckpt.model.manifest import LINK_REMAP, OPEN, CapturedFile, Manifest

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

    @property
    def words(self) -> str:
        """What will be done, for a person."""
        path = self.file.path
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
        if not skip and not file.path.startswith(KERNEL):
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
    """Everything that this restore would do to files, as it was asked to."""
    captured = captured_open(facts.manifest)
    found = (_act(facts, file, captured) for file in needed(facts) if stat.S_ISREG(file.mode))
    return tuple({act.file.path: act for act in found if act is not None}.values())


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
        return facts.captured_here.get(file.path, "other")
    return "same" if here.size == file.size else "grown" if here.size > file.size else "other"


def can_be_cut(file: OpenFile, captured: CapturedFile | None) -> bool:
    """What the tree only reads grew by other hands: without the image's copy nobody may cut that."""
    return not is_program(file) and (captured is not None or writes(file))


def stays_as_it_is(file: OpenFile) -> bool:
    """Unlike the dump's it does no harm."""
    return appends_only(file)

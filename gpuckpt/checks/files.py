"""Checks of the files that a restored tree needs at their old paths. All differences are named at once.

CRIU compares size, mode and build-id of every open or mapped file and stops at the first difference; it does not
compare times or contents (criu/files-reg.c, validate_file).
"""

from __future__ import annotations

import shlex
import stat
from collections.abc import Iterator

from gpuckpt.checks.check import Check, Judgement, none_of
from gpuckpt.checks.facts import RestoreFacts
from gpuckpt.checks.gpu_restore import is_driver_library
from gpuckpt.checks.image import appends_only
from gpuckpt.model.facts import OpenFile


def _needed(facts: RestoreFacts) -> Iterator[OpenFile]:
    """Files that must lie here: not deleted ones (in the image), captured ones, /proc's and /sys's, the driver's."""
    captured = {captured.path for captured in facts.manifest.captured}
    for file in facts.tree.files:
        skip = file.deleted or file.path in captured or is_driver_library(file.path)
        if not skip and not file.path.startswith(("/proc/", "/sys/")):
            yield file


def _pairs(facts: RestoreFacts) -> Iterator[tuple[OpenFile, OpenFile]]:
    """(at the dump, here) for every needed file that is here."""
    for file in _needed(facts):
        here = facts.files_here.get(file.path)
        if here is not None:
            yield file, here


def _is_program(file: OpenFile) -> bool:
    return file.build_id is not None or any(use.endswith(" exe") for use in file.uses)


def _missing(facts: RestoreFacts) -> Judgement:
    missing = [
        f"{file.path} ({file.uses[0] if file.uses else 'used'})"
        for file in _needed(facts)
        if not stat.S_ISDIR(file.mode) and file.path in facts.files_here and facts.files_here[file.path] is None
    ]
    hint = "copy each to the same path here, with its mode (for example rsync -aHR SOURCE:PATH /)"
    return none_of(missing, expected="every file of the tree at its path", hint=hint, fine="all there")


def _directories(facts: RestoreFacts) -> Judgement:
    wrong = []
    for file in _needed(facts):
        if stat.S_ISDIR(file.mode) and file.path in facts.files_here:
            here = facts.files_here[file.path]
            if here is None:
                wrong.append(f"{file.path} is missing ({file.uses[0] if file.uses else 'used'})")
            elif not stat.S_ISDIR(here.mode):
                wrong.append(f"{file.path} is no directory here")
    return none_of(wrong, expected="every directory of the tree", hint="make each: mkdir -p PATH", fine="all there")


def _size(facts: RestoreFacts) -> Judgement:
    other = [
        (file, here)
        for file, here in _pairs(facts)
        if stat.S_ISREG(file.mode) and here.size != file.size and not _is_program(file) and not appends_only(file)
    ]
    wrong = [f"{file.path} has {here.size} bytes, had {file.size}" for file, here in other]
    cuts = [_cut(file) for file, here in other if here.size > file.size]
    hint = "put the files of the dump's time back"
    hint += f"; what only grew (a log) is cut back by: {'; '.join(cuts)}" if cuts else ""
    return none_of(wrong, expected="files of the size they had at the dump", hint=hint, fine="the same")


def _cut(file: OpenFile) -> str:
    """The command that keeps what was written later and cuts a file to its size at the dump."""
    path = shlex.quote(file.path)
    return f"`cp -a {path} {shlex.quote(f'{file.path}.later')} && truncate -s {file.size} {path}`"


def _build(facts: RestoreFacts) -> Judgement:
    wrong = []
    for file, here in _pairs(facts):
        if not _is_program(file) or not stat.S_ISREG(file.mode):
            continue
        if here.build_id != file.build_id:
            wrong.append(f"{file.path} has build-id {here.build_id or 'none'}, had {file.build_id or 'none'}")
        elif here.size != file.size:
            wrong.append(f"{file.path} has {here.size} bytes, had {file.size}")
    hint = (
        "install the same packages as on "
        f"{facts.manifest.host.hostname} (same version, same build): half their code is in the image"
    )
    return none_of(wrong, expected="the same programs and libraries", hint=hint, fine="the same")


def _mode(facts: RestoreFacts) -> Judgement:
    wrong = [
        f"{file.path} has mode {here.mode:06o}, had {file.mode:06o}"
        for file, here in _pairs(facts)
        if here.mode != file.mode and not (stat.S_ISDIR(file.mode) and not stat.S_ISDIR(here.mode))
    ]
    hint = "chmod each to the last four digits it had; where the first two differ, it is another kind of file"
    return none_of(wrong, expected="files with the mode they had", hint=hint, fine="the same")


def _owner(facts: RestoreFacts) -> Judgement:
    wrong = []
    for file, here in _pairs(facts):
        if (here.uid, here.gid) != (file.uid, file.gid):
            wrong.append(f"{file.path} belongs to {here.uid}:{here.gid}, belonged to {file.uid}:{file.gid}")
        if here.resolved != file.resolved:
            wrong.append(f"{file.path} is reached through a link now and is {here.resolved or file.path}")
    hint = (
        "see who has changed that: the restored tree has each of them open as if it were the old one, with the rights "
        "it had then; `chown USER:GROUP PATH` gives one back, a link must give way to the file"
    )
    return none_of(wrong, expected="files of their owners, at their own paths", hint=hint, fine="the same")


def _content(facts: RestoreFacts) -> Judgement:
    changed = [
        file.path
        for file, here in _pairs(facts)
        if stat.S_ISREG(file.mode)
        and here.size == file.size
        and not _is_program(file)
        and int(here.mtime) != int(file.mtime)
    ]
    hint = "nobody compares their contents: make sure that they are the files of the dump (rsync -c SOURCE:PATH PATH)"
    return none_of(changed, expected="files not written since the dump", hint=hint, fine="the same times")


def _captured(facts: RestoreFacts) -> Judgement | None:
    if not facts.manifest.captured:
        return None
    other = []
    for captured in facts.manifest.captured:
        here = facts.files_here.get(captured.path)
        if here is not None and int(here.mtime) != captured.mtime_ns // 1_000_000_000:
            other.append(f"{captured.path} is here already, and not the one of the image")
    hint = "move it away first: the restore puts the image's file there"
    return none_of(other, expected="free places for the files in the image", hint=hint, fine="free")


FILES_MISSING: Check[RestoreFacts] = Check(
    "files-missing", "block", "every file the tree had open is here", _missing, allowable=False
)
DIRECTORIES: Check[RestoreFacts] = Check(
    "directories", "block", "working and root directories of the tree are here", _directories, allowable=False
)
FILES_SIZE: Check[RestoreFacts] = Check("files-size", "block", "files have the size they had", _size, allowable=False)
FILES_BUILD: Check[RestoreFacts] = Check(
    "files-build", "block", "programs and libraries are the same builds", _build, allowable=False
)
FILES_MODE: Check[RestoreFacts] = Check("files-mode", "block", "files have the mode they had", _mode, allowable=False)
FILES_OWNER: Check[RestoreFacts] = Check(
    "files-owner", "block", "files belong to whom they did, and no link leads to others", _owner
)
FILES_CONTENT: Check[RestoreFacts] = Check("files-content", "note", "files were not written since the dump", _content)
FILES_CAPTURED: Check[RestoreFacts] = Check(
    "files-captured", "block", "nothing else stands where files of the image belong", _captured
)

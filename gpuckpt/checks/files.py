"""Checks of the files that a restored tree needs at their old paths. All differences are named at once.

CRIU compares size, mode and build-id of every open or mapped file and stops at the first difference; it does not
compare times or contents (criu/files-reg.c, validate_file).
"""

from __future__ import annotations

import shlex
import stat
from collections.abc import Iterable, Mapping
from pathlib import PurePosixPath

from gpuckpt.checks.check import Check, Judgement, failed, listing, none_of, passed
from gpuckpt.checks.facts import RestoreFacts, has_own_place
from gpuckpt.checks.fileplan import (
    can_be_cut,
    captured_open,
    changed,
    file_acts,
    is_program,
    needed,
    pairs,
    severed,
    stays_as_it_is,
)
from gpuckpt.model.facts import OpenFile
from gpuckpt.model.manifest import LINK_REMAP, CapturedFile

FOR = "for "


def _acts(facts: RestoreFacts, *kinds: str) -> dict[str, str]:
    """Path -> what the restore does there, in words."""
    return {act.file.path: act.words for act in file_acts(facts) if act.kind in kinds}


def _missing(facts: RestoreFacts) -> Judgement:
    put = _acts(facts, "put")
    missing = [
        f"{file.path} ({file.uses[0] if file.uses else 'used'})"
        for file in needed(facts)
        if not stat.S_ISDIR(file.mode) and file.path in facts.files_here and facts.files_here[file.path] is None
        if file.path not in put
    ]
    hint = "copy each to the same path here, with its mode (for example rsync -aHR SOURCE:PATH /)"
    fine = listing(put.values()) or "all there"
    return none_of(missing, expected="every file of the tree at its path", hint=hint, fine=fine)


def _directories(facts: RestoreFacts) -> Judgement:
    uses = {file.path: file.uses[0] if file.uses else "used" for file in needed(facts) if stat.S_ISDIR(file.mode)}
    uses |= {str(PurePosixPath(path).parent): f"{FOR}{path}" for path in _acts(facts, "put")}
    wrong, absent = [], []
    for path, use in uses.items():
        here = facts.files_here.get(path)
        if here is not None and not stat.S_ISDIR(here.mode):
            wrong.append(f"{path} is no directory here")
        elif here is not None and here.resolved and use.startswith(FOR):
            wrong.append(f"{path} is reached through a link: nothing is put behind one ({use})")
        elif here is None and path in facts.files_here:
            wrong.append(f"{path} is missing ({use})")
            absent.append(path)
    hint = f"make each, with the owner it had: mkdir -p {shlex.join(absent)}" if absent else "move what is there away"
    return none_of(wrong, expected="every directory of the tree", hint=hint, fine="all there")


def _size(facts: RestoreFacts) -> Judgement:
    captured, done = captured_open(facts.manifest), _acts(facts, "replace", "cut")
    other = [
        (file, here)
        for file, here in pairs(facts)
        if stat.S_ISREG(file.mode) and here.size != file.size and not stays_as_it_is(file) and file.path not in done
        if file.path in captured or not is_program(file)
    ]
    wrong = [f"{file.path} has {here.size} bytes, had {file.size}" for file, here in other]
    fine = listing(done.values()) or "the same"
    return none_of(wrong, expected="files of the size they had at the dump", hint=_ways(facts, other), fine=fine)


def _ways(facts: RestoreFacts, other: Iterable[tuple[OpenFile, OpenFile]]) -> str:
    """What can be done about files that are not as they were; an option only where it would help."""
    if facts.request.clone:
        return "put the files of the dump's time back by hand: a clone changes none, for others may use them"
    captured = captured_open(facts.manifest)
    grown = [(f, captured.get(f.path)) for f, h in other if changed(facts, f, h, captured.get(f.path)) == "grown"]
    cut = [f.path for f, copy in grown if can_be_cut(f, copy)]
    unknown = [f.path for f, copy in grown if copy is None and f.path in cut]
    by_hand = [_cut(f) for f, copy in grown if not can_be_cut(f, copy)]
    ways = []
    if cut:
        ways.append(f"--truncate-files cuts what only grew ({listing(cut)}) and keeps the rest as NAME.later-ID")
    if unknown:
        ways.append(f"whether the first bytes of {listing(unknown)} are the old ones is not known")
    if any(file.path in captured for file, _ in other):
        ways.append("--overwrite-files moves what is here to NAME.before-restore-ID and puts the image's files there")
    if not all(file.path in captured for file, _ in other):
        ways.append("put the files of the dump's time back")
    if by_hand:
        ways.append(f"what only grew is cut back by: {'; '.join(by_hand)}")
    return "; ".join(ways)


def _cut(file: OpenFile) -> str:
    """The command that keeps what was written later and cuts a file to its size at the dump."""
    path = shlex.quote(file.path)
    return f"`cp -a {path} {shlex.quote(f'{file.path}.later')} && truncate -s {file.size} {path}`"


def _changed(facts: RestoreFacts) -> Judgement | None:
    """Of the same size; others are named by files-size."""
    captured, done = captured_open(facts.manifest), _acts(facts, "replace", "cut")
    if not captured:
        return None
    other = [
        (file, here)
        for file, here in pairs(facts)
        if file.path in captured and file.path not in done and here.size == file.size and not stays_as_it_is(file)
        if stat.S_ISREG(file.mode) and changed(facts, file, here, captured[file.path]) != "same"
    ]
    wrong = [_how_changed(facts, here, captured[file.path]) for file, here in other]
    expected = "files with the content that was saved into the image"
    if not wrong:
        return passed(expected, listing(done.values()) or "the same, or missing")
    return failed(expected, f"written since the dump: {listing(wrong)}", _ways(facts, other))


def _how_changed(facts: RestoreFacts, here: OpenFile, captured: CapturedFile) -> str:
    apart = f" (it was the same file as {captured.linked_to})" if severed(facts, here, captured) else ""
    return f"{captured.path}{apart}"


def _build(facts: RestoreFacts) -> Judgement:
    wrong = []
    captured = captured_open(facts.manifest)
    for file, here in pairs(facts):
        if not is_program(file) or not stat.S_ISREG(file.mode) or file.path in captured:
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
    replaced = _acts(facts, "replace")
    wrong = [
        f"{file.path} has mode {here.mode:06o}, had {file.mode:06o}"
        for file, here in pairs(facts)
        if here.mode != file.mode and not (stat.S_ISDIR(file.mode) and not stat.S_ISDIR(here.mode))
        if file.path not in replaced or not stat.S_ISREG(here.mode)
    ]
    hint = "chmod each to the last four digits it had; where the first two differ, it is another kind of file"
    return none_of(wrong, expected="files with the mode they had", hint=hint, fine="the same")


def _owner(facts: RestoreFacts) -> Judgement:
    wrong = []
    replaced = _acts(facts, "replace")
    for file, here in pairs(facts):
        if (here.uid, here.gid) != (file.uid, file.gid) and file.path not in replaced:
            wrong.append(f"{file.path} belongs to {here.uid}:{here.gid}, belonged to {file.uid}:{file.gid}")
        if here.resolved != file.resolved:
            wrong.append(f"{file.path} is reached through a link now and is {here.resolved or file.path}")
    hint = (
        "see who has changed that: the restored tree has each of them open as if it were the old one, with the rights "
        "it had then; `chown USER:GROUP PATH` gives one back, a link must give way to the file"
    )
    return none_of(wrong, expected="files of their owners, at their own paths", hint=hint, fine="the same")


def _content(facts: RestoreFacts) -> Judgement:
    if facts.contents is not None:
        return _compared(facts, facts.contents)
    captured = captured_open(facts.manifest)
    written = [
        file.path
        for file, here in pairs(facts)
        if stat.S_ISREG(file.mode)
        and here.size == file.size
        and not is_program(file)
        and file.path not in captured
        and int(here.mtime) != int(file.mtime)
    ]
    hint = "nobody compares their contents: make sure that they are the files of the dump (rsync -c SOURCE:PATH PATH)"
    return none_of(written, expected="files not written since the dump", hint=hint, fine="the same times")


def _compared(facts: RestoreFacts, contents: Mapping[str, bool]) -> Judgement:
    """Other sizes are named by files-size."""
    other = [file.path for file, here in pairs(facts) if here.size == file.size and not contents.get(file.path, True)]
    hint = f"bring the same files here, or take them along: --carry-files {shlex.quote(other[0])}" if other else ""
    return none_of(
        other,
        expected="files with the bytes they have where the job runs",
        hint=hint,
        fine="the same",
        severity="block",
    )


def _captured(facts: RestoreFacts) -> Judgement | None:
    remaps = [
        captured
        for captured in facts.manifest.captured
        if captured.reason == LINK_REMAP and not has_own_place(facts, captured.path)
    ]
    if not remaps:
        return None
    other = []
    for captured in remaps:
        here = facts.files_here.get(captured.path)
        if here is not None and int(here.mtime) != captured.mtime_ns // 1_000_000_000:
            other.append(f"{captured.path} is here already, and not the one of the image")
    hint = "move it away first: the restore puts the image's file there"
    return none_of(other, expected="free places for the files in the image", hint=hint, fine="free")


def _written(facts: RestoreFacts) -> Judgement | None:
    if not _acts(facts, "replace"):
        return None
    written = [f"{path} by {who}" for path, who in sorted(facts.writers.items())]
    hint = "stop it first: it would go on writing into the file that is moved aside, NAME.before-restore-ID"
    return none_of(written, expected="files to move aside that nobody writes to", hint=hint, fine="nobody does")


FILES_WRITTEN: Check[RestoreFacts] = Check(
    "files-written", "block", "nobody writes to the files that --overwrite-files moves aside", _written
)
FILES_MISSING: Check[RestoreFacts] = Check(
    "files-missing", "block", "every file the tree had open is here", _missing, allowable=False
)
DIRECTORIES: Check[RestoreFacts] = Check(
    "directories", "block", "working and root directories of the tree are here", _directories, allowable=False
)
FILES_SIZE: Check[RestoreFacts] = Check("files-size", "block", "files have the size they had", _size, allowable=False)
FILES_CHANGED: Check[RestoreFacts] = Check(
    "files-changed", "block", "files that are in the image are here as they were, or missing", _changed
)
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

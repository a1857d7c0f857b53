"""Which open files a dump saves into the image: `--capture-files`, and what is right without it."""

from __future__ import annotations

import fnmatch
import os
import stat
from collections.abc import Mapping
from dataclasses import field

from gpuckpt.checks.check import Check, Judgement, failed, listing, passed, size
from gpuckpt.checks.facts import DumpFacts
from gpuckpt.model.facts import OpenFile, Tree
from gpuckpt.model.manifest import SET_ID
from gpuckpt.model.records import dataclass
from gpuckpt.model.requests import DumpRequest

CAPTURE_LIMIT_BYTES = 1 << 30
"""So much is saved unasked: the job stands still meanwhile. What somebody asks for has no limit."""

KERNEL = ("/proc/", "/sys/")
WILDCARDS = "*?["


@dataclass(frozen=True, slots=True)
class Choice:
    """The files to save, and those that would be but for a reason."""

    files: tuple[OpenFile, ...]
    asked: bool
    """Somebody named them: then one that cannot be saved fails the dump."""
    left: Mapping[str, str] = field(default_factory=dict)
    """Path -> why it is left."""


def chosen_files(request: DumpRequest, tree: Tree) -> Choice:
    """What this dump saves of the tree's open files, by path."""
    if request.capture_files:
        return _asked(request, tree)
    if not request.leave_running:
        return Choice((), asked=False)
    return _within_limit([file for file in writable_regular_files(tree) if _can_be_captured(file)])


def _asked(request: DumpRequest, tree: Tree) -> Choice:
    wanted = [file for file in _candidates(tree) if any(means(word, file) for word in request.capture_files)]
    if not request.capture_code:
        wanted = [file for file in wanted if not _is_code(file) and file.build_id is None]
    return Choice(tuple(file for file in wanted if _can_be_captured(file)), asked=True)


def _within_limit(files: list[OpenFile]) -> Choice:
    """The smaller ones first: of a log and a data set of 2 TiB the log at least is saved."""
    taken: list[OpenFile] = []
    left = {}
    for file in sorted(files, key=lambda file: file.size):
        if sum(one.size for one in taken) + file.size <= CAPTURE_LIMIT_BYTES:
            taken.append(file)
        else:
            left[file.path] = f"more than {size(CAPTURE_LIMIT_BYTES)} in all"
    return Choice(tuple(sorted(taken, key=lambda file: file.path)), asked=False, left=left)


def means(word: str, file: OpenFile) -> bool:
    """Whether a word of --capture-files or --carry-files names this file."""
    if word == "none":
        return False
    if word == "writable":
        return writes(file)
    if word == "all":
        return writes(file) or not _is_code(file)
    return fnmatch.fnmatchcase(file.path, word) if is_pattern(word) else file.path == word


def is_pattern(word: str) -> bool:
    """Not the path of one file."""
    return any(sign in word for sign in WILDCARDS)


def _is_code(file: OpenFile) -> bool:
    return any(use.endswith((" exe", " map exec")) for use in file.uses)


def _candidates(tree: Tree) -> list[OpenFile]:
    """Regular files with a name. What was deleted is in the image anyway."""
    return [f for f in tree.files if stat.S_ISREG(f.mode) and not f.deleted and not f.path.startswith(KERNEL)]


def _can_be_captured(file: OpenFile) -> bool:
    """A restore never makes a file that runs with the rights of its owner."""
    return not file.mode & SET_ID


def writable_regular_files(tree: Tree) -> list[OpenFile]:
    """Regular files that the tree has open for writing or maps shared and writable."""
    return [file for file in _candidates(tree) if writes(file)]


def needs_at_restore(request: DumpRequest, tree: Tree) -> list[dict[str, str]]:
    """What a restore will need of each file that the tree can change, for a dump's plan: `path` and `needed`."""
    saved = {file.path for file in chosen_files(request, tree).files}
    return [
        {
            "path": file.path,
            "needed": "in-image" if file.path in saved else "may-grow" if appends_only(file) else "unchanged",
        }
        for file in writable_regular_files(tree)
    ]


def writable_files(tree: Tree) -> tuple[OpenFile, ...]:
    """Regular files that the tree can change and whose size CRIU compares at restore."""
    return tuple(file for file in writable_regular_files(tree) if not appends_only(file))


def writes(file: OpenFile) -> bool:
    """The tree can change it."""
    by_descriptor = file.flags is not None and file.flags & os.O_ACCMODE != os.O_RDONLY
    return by_descriptor or any("shared-write" in use for use in file.uses)


def appends_only(file: OpenFile) -> bool:
    """Open for nothing but appending: CRIU stores no size for it, so it may have grown since."""
    if file.flags is None or not all(" fd " in use for use in file.uses):
        return False
    return file.flags & os.O_ACCMODE == os.O_WRONLY and bool(file.flags & os.O_APPEND)


def _capture(facts: DumpFacts) -> Judgement | None:
    words = [word for word in facts.request.capture_files if word not in ("writable", "all", "none")]
    if not words:
        return None
    expected = "files that the tree has open, for --capture-files"
    idle = {word: why for word in words if (why := _why_idle(word, facts))}
    if not idle:
        return passed(expected, f"{len(chosen_files(facts.request, facts.tree).files)} of them")
    found = listing(f"{word}: {why}" for word, why in idle.items())
    hint = "`gpuckpt inspect --tree PID` lists what it has open; leave out what need not be saved"
    return failed(expected, found, hint, "warn" if all(is_pattern(word) for word in idle) else None)


def _why_idle(word: str, facts: DumpFacts) -> str:
    """Why a path or pattern names nothing that can be saved; '' where it does."""
    tree = facts.tree
    meant = [file for file in tree.files if means(word, file)]
    regular = [file for file in meant if file in _candidates(tree)]
    if any(_can_be_captured(file) for file in regular):
        if facts.request.capture_code or any(not _is_code(file) and file.build_id is None for file in regular):
            return ""
        return "a program or library: those are never carried to another host"
    if regular:
        return "it has the setuid or setgid bit, and a restore gives that to no file"
    if any(file.deleted for file in meant):
        return "its name was deleted, so it is in the image anyway"
    return "no regular file" if meant else "the tree has no such file open"


def _left_files(facts: DumpFacts) -> Judgement | None:
    if not facts.request.leave_running:
        return None
    choice = chosen_files(facts.request, facts.tree)
    left = {**choice.left, **facts.not_captured}
    saved = {file.path for file in choice.files} - set(left)
    lost = [file for file in writable_files(facts.tree) if file.path not in saved]
    found = [f"{file.path} ({file.size} bytes{_why(left.get(file.path))})" for file in lost]
    hint = (
        "say --capture-files writable to save them into the image whatever their size, or copy each right after the "
        "dump: a restore needs them as large as they are now"
    )
    if not found:
        return passed("no files that the job changes after the dump, but those in the image", "none")
    return failed("files that the job changes are in the image", listing(found), hint)


def _why(reason: str | None) -> str:
    return f", {reason}" if reason else ""


CAPTURE_FILES: Check[DumpFacts] = Check(
    "capture-files", "block", "--capture-files names files that the tree has open", _capture
)
LEFT_FILES: Check[DumpFacts] = Check(
    "left-files", "warn", "what a job left running changes after the dump is in the image", _left_files
)

"""A series of images in one directory: how they are named, and which of them go. Names and rules only.

    DIR/NAME-20261130T140526Z      an image; its name ascends, whatever the clock does
    DIR/latest                     a link to the newest

An image that cannot be read as a whole counts for nothing here and is never removed: what is not understood
may be worth something to somebody.
"""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field

from gpuckpt.model.records import dataclass

LATEST = "latest"
STAMP = "%Y%m%dT%H%M%SZ"
FULL_EVERY_SECONDS = 7 * 86400.0
MOST_CHARACTERS = 100
_MEMBER = re.compile(r"(?P<series>.+)-(?P<stamp>[0-9]{8}T[0-9]{6}Z)")
_NAME = re.compile(rf"\w[\w.@+-]{{0,{MOST_CHARACTERS - 1}}}")
_FOREIGN = re.compile(r"[^\w.@+-]")


class ClockAtEnd(ValueError):
    """No later name than the last one can be written with four digits for the year."""


def is_name(text: str) -> bool:
    """Whether a series can have this name: letters, digits and . _ @ + - , no mark in front."""
    return _NAME.fullmatch(text) is not None and len(text.encode("utf-8", "surrogateescape")) <= 2 * MOST_CHARACTERS


def names_one(text: str) -> bool:
    """Whether this is the name of something in a directory, and leads nowhere else."""
    return text not in ("", ".", "..") and "/" not in text and "\0" not in text


def newest_of(names: Iterable[str], latest: str) -> str:
    """The newest image among the names of a directory, by `latest` (what the link leads to) if it is one of them.

    Empty where there is no image of a series.
    """
    members = [name for name in names if parse(name) is not None]
    return latest if latest in members else max(members, default="")


def default_name(program: str, pid: int) -> str:
    """The name of a series that nobody named: two jobs with the same program never share one."""
    plain = _FOREIGN.sub("_", program.encode("ascii", "replace").decode()).lstrip(".@+-")
    return f"{plain[: MOST_CHARACTERS // 2] or 'process'}-{pid}"


def member_name(series: str, seconds: float) -> str:
    """The name of an image; `seconds` since 1970. Raises ClockAtEnd."""
    try:
        moment = dt.datetime.fromtimestamp(int(seconds), dt.timezone.utc)
    except (OverflowError, ValueError, OSError):
        raise ClockAtEnd from None
    return f"{series}-{moment:{STAMP}}"


def parse(name: str) -> tuple[str, float] | None:
    """(series, seconds since 1970) of an image's name; None for any other name."""
    match = _MEMBER.fullmatch(name)
    if match is None:
        return None
    try:
        moment = dt.datetime.strptime(match["stamp"], STAMP).replace(tzinfo=dt.timezone.utc)
    except ValueError:
        return None
    return match["series"], moment.timestamp()


def next_name(series: str, taken: Iterable[str], now: float) -> str:
    """A name that sorts behind all of the series: where the clock was set back, it counts on. Raises ClockAtEnd.

    `taken` are all names in the directory, those of images under work (NAME.partial) included.
    """
    stamps = (found[1] for name in taken if (found := parse(name.removesuffix(".partial"))) and found[0] == series)
    return member_name(series, max(int(now), int(max(stamps, default=-1.0)) + 1))


@dataclass(frozen=True, slots=True)
class File:
    """A file of an image, known by its inode."""

    bytes: int
    """Allocated."""
    names: int
    """Under how many names this image has it."""
    links: int
    """How many names it has in all."""


Files = Mapping[tuple[int, int], File]
"""(device, inode) -> file."""


@dataclass(frozen=True, slots=True)
class Member:
    """A whole image of a series."""

    name: str
    created: float
    """By the clock of the dump."""
    full_created: float = 0.0
    """When the memory it shares with older images was last written whole; 0 where that is not known."""
    files: Files = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class MinFree:
    """How much shall be free: bytes, or a share of the file system."""

    bytes: int = 0
    share: float = 0.0

    def of(self, total_bytes: int) -> int:
        """In bytes."""
        return max(self.bytes, int(self.share * total_bytes))


@dataclass(frozen=True, slots=True)
class Rules:
    """Which images stay. `keep` and `keep_within_seconds` are a union; without both all stay."""

    keep: int | None = None
    keep_within_seconds: float | None = None
    min_free: MinFree | None = None

    def __post_init__(self) -> None:
        """Another host can send rules: refuse those that no command line gives."""
        if self.keep is not None and self.keep < 1:
            raise ValueError(self.keep)


@dataclass(frozen=True, slots=True)
class Space:
    """A file system."""

    free_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True)
class Going:
    """The images that go, oldest first, and what will still be missing."""

    names: tuple[str, ...] = ()
    missing_bytes: int = 0
    """How much less than --min-free will be free."""


def full_is_due(newest: Member, full_every_seconds: float, now: float) -> bool:
    """Whether the next image shall share nothing with the newest.

    What was written whole in the future was written while the clock was wrong: it has no age.
    """
    return newest.full_created == 0 or abs(now - newest.full_created) >= full_every_seconds


def going(
    members: Sequence[Member], rules: Rules, space: Space, now: float, untouchable: frozenset[str] = frozenset()
) -> Going:
    """Which images go. The newest never does, nor does one that is `untouchable` (in use)."""
    ordered = sorted(members, key=lambda member: member.name)
    old = [member for member in ordered[:-1] if member.name not in untouchable]
    counted = {member.name for member in ordered[-rules.keep :]} if rules.keep is not None else set[str]()
    by_rule = [member for member in old if not _stays(member, counted, rules, now)]
    if rules.min_free is None:
        return Going(_names(by_rule))
    going_anyway = set(_names(by_rule))
    left = [member for member in old if member.name not in going_anyway]
    missing = rules.min_free.of(space.total_bytes) - space.free_bytes - gain(by_rule)
    for_room, missing = _for_room(by_rule, left, missing)
    return Going(_names(sorted(by_rule + for_room, key=lambda member: member.name)), max(0, missing))


def _names(members: Iterable[Member]) -> tuple[str, ...]:
    return tuple(member.name for member in members)


def _stays(member: Member, counted: set[str], rules: Rules, now: float) -> bool:
    if rules.keep is None and rules.keep_within_seconds is None:
        return True
    young = rules.keep_within_seconds is not None and now - member.created <= rules.keep_within_seconds
    return young or member.name in counted


def _for_room(gone: Sequence[Member], left: Sequence[Member], missing: int) -> tuple[list[Member], int]:
    """The oldest of those left, as many as are needed; none behind the last whose going gains anything."""
    useful, still = 0, missing
    for number, gained in enumerate(_gains([*gone, *left])[len(gone) :], 1):
        if still <= 0:
            break
        if gained:
            useful, still = number, still - gained
    return list(left[:useful]), still


def gain(members: Iterable[Member]) -> int:
    """Bytes that are free once these images have gone: only files that nothing else has a name for."""
    return sum(_gains(members))


def _gains(members: Iterable[Member]) -> list[int]:
    """What each of them frees if they go in this order."""
    names: dict[tuple[int, int], int] = {}
    found = []
    for member in members:
        freed = 0
        for inode, file in member.files.items():
            names[inode] = names.get(inode, 0) + file.names
            freed += file.bytes if names[inode] >= file.links else 0
        found.append(freed)
    return found


def copies(members: Sequence[Files]) -> list[int]:
    """For each image, oldest first: how many images up to it that share no file with each other lie on the disk.

    1 means that one damaged block can take all of them.
    """
    parents: dict[object, object] = {}

    def top(key: object) -> object:
        while (above := parents.setdefault(key, key)) != key:
            key = above
        return key

    for number, files in enumerate(members):
        for inode in files:
            parents[top(inode)] = top(number)
    groups = [top(number) for number in range(len(members))]
    return [len(set(groups[: number + 1])) for number in range(len(members))]

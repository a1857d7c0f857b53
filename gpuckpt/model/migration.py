"""What two gpuckpts tell each other in a migration: how the job shall come up, and what became of it."""

from __future__ import annotations

from dataclasses import field
from typing import Literal

from gpuckpt.model.records import dataclass
from gpuckpt.model.requests import Hooks, Readiness

INCOMING_PLACE = "/var/lib/gpuckpt/incoming"
"""Where, on the other host, images lie that go again when their job runs."""

SEED = "-seed"
"""How the name of an image that is sent beforehand ends."""

FILES = "-files"
"""How the name of an image of nothing but files ends, that is sent beforehand."""

QUESTIONS = ("judge", "warm", "prepare", "go", "watch", "verdict", "finish", "discard", "sample")
"""What the far side of a migration answers, beside what the far side of a push does (flows/receiving.py)."""

Verdict = Literal["running", "ended", "cancelled"]
"""Of a copy that was told to go: it runs; it came alive and has ended; it never ran and never will."""

VERDICTS = ("running", "ended", "cancelled")


@dataclass(frozen=True, slots=True)
class Directory:
    """A directory that the job needs, as it is on the host it leaves."""

    path: str
    mode: int
    uid: int
    gid: int
    mtime_ns: int


@dataclass(frozen=True, slots=True)
class Link:
    """A symbolic link that goes along."""

    path: str
    target: str
    uid: int
    gid: int
    mtime_ns: int


@dataclass(frozen=True, slots=True)
class Terms:
    """How the job shall come up on the other host. Paths are the other host's."""

    transaction: str
    """The migration's name: the id of its image."""
    name: str
    """The directory of the image, in `directory`."""
    directory: str = ""
    """Where the image stays; '' where it goes again after success."""
    stdio: dict[str, str] = field(default_factory=dict)
    """'0', '1', '2' -> file."""
    gpu_map: dict[str, str] = field(default_factory=dict)
    allow: tuple[str, ...] = ()
    settle_seconds: float = 3.0
    force_program: bool = False
    huge_pages: bool = False
    readiness: Readiness = field(default_factory=Readiness)
    hooks: Hooks = field(default_factory=Hooks)
    """Run there, around the restore."""
    seed: str = ""
    """The directory, beside the image's, of one that was sent before; it goes when this one has arrived."""
    files: str = ""
    """As `seed`, of files alone."""
    directories: tuple[Directory, ...] = ()
    """Made there where they are missing."""
    links: tuple[Link, ...] = ()
    """As `directories`."""

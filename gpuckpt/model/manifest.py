"""manifest.json: what an image is, written last, so that its presence means "complete".

One integer version, a readable range, an ordered list of upgrades, and required features that a
reader must know. The digest in the last key covers the canonical form of everything else.
"""

from __future__ import annotations

import json
import re
import stat
from dataclasses import field, replace
from pathlib import PurePosixPath
from typing import Any

import blake3

from gpuckpt.model.errors import ImageCorrupt, ImageTooNew
from gpuckpt.model.facts import Host, OpenFile, ProcessId, Tree
from gpuckpt.model.jsonform import FormError, from_json, to_json
from gpuckpt.model.records import dataclass

NAME = "manifest.json"
SIGNATURE = "manifest.json.sig"
"""OpenSSH's signature of manifest.json as it stands: `ssh-keygen -Y verify` verifies it by hand. It is no part of the
image: the manifest names each part by its digest, and a signature of the manifest cannot stand in the manifest."""

FORMAT = 1
OLDEST_FORMAT = 1
KNOWN_FEATURES = frozenset({"criu-files", "packs", "open-files", "encrypted"})
"""criu-files: pages lie in criu/pages-*.img as CRIU wrote them; packs: in packs/, see images/packindex.py;
open-files: files/ holds files that the tree had open (OPEN); encrypted: see images/sealing.py and model/redacted.py."""

LINK_REMAP = "link-remap"
"""Why a file was captured: CRIU made this further name of a deleted file, see images/captured.py."""

OPEN = "open"
"""Why a file was captured: the tree had it open or mapped, and it may be another one by the restore."""

MAX_BYTES = 64 << 20
"""A longer manifest is refused before it is parsed: it is read whole, from files that may be hostile."""

MAX_MESSAGE = 200
"""How much of a hostile value an error message repeats."""

MAX_NUMBER = 2**64
MAX_PID = 1 << 22
"""The kernel's own limit (PID_MAX_LIMIT)."""

MAX_TIME = 253402300800.0
"""The year 10000: the last second that calendars in programs know."""


@dataclass(frozen=True, slots=True)
class Part:
    """One file of the image, by its path below the image directory."""

    path: str
    size: int
    blake3: str


@dataclass(frozen=True, slots=True)
class CapturedFile:
    """A file saved into files/ because the tree needs it and it will not survive outside the image."""

    path: str
    """Where it belongs on the host, absolute."""
    part: str
    """Its path below the image directory."""
    reason: str
    """LINK_REMAP or OPEN."""
    mode: int
    uid: int
    gid: int
    mtime_ns: int
    linked_to: str = ""
    """Another name of the same inode: put back as a hard link to it. Of an open file: the captured one of that part."""


GHOST_LIMIT_BYTES = 1 << 30
"""Deleted files are saved up to this size; CRIU's own limit is 1 MiB."""


@dataclass(frozen=True, slots=True)
class CriuOptions:
    """What restore must repeat, and what CRIU recorded."""

    version: str
    run_id: str
    shell_job: bool
    tcp_established: bool
    network_lock: str
    file_locks: bool
    ghost_limit_bytes: int
    ext_unix_sockets: bool
    external: tuple[str, ...]
    """--external values of the dump: 'unix[123]' …"""
    cpu_cap: str
    lsm: str = ""


SMALLEST_PAGE = 4096
MOST_COPIES = 1024
"""Ranges of one process; the driver was seen to make one."""


@dataclass(frozen=True, slots=True)
class CudaSuspension:
    """How one CUDA process was suspended, in the order of the suspension."""

    id: ProcessId
    restore_tid: int
    gpu_memory_bytes: dict[str, int]
    """GPU UUID -> bytes in use before the suspension."""
    host_copies: tuple[tuple[int, int], ...] = ()
    """Where the driver has put its copy: ranges of addresses [start, end), whole pages."""


@dataclass(frozen=True, slots=True)
class Lineage:
    """Where this image comes from."""

    parent_image_id: str | None = None
    generation: int = 1
    """1 for a process that was never restored; a dump of a restored tree counts on."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """The whole manifest."""

    format: int
    requires: tuple[str, ...]
    image_id: str
    created: float
    gpuckpt: str
    host: Host
    tree: Tree
    criu: CriuOptions
    parts: tuple[Part, ...]
    captured: tuple[CapturedFile, ...]
    stopped: tuple[ProcessId, ...]
    """Processes that were stopped by a signal before the dump and stay so."""
    handed_over_stopped: bool
    """CRIU saw the tree in state T (the CUDA hold): it comes up stopped."""
    cuda: tuple[CudaSuspension, ...]
    tcp: str
    """The policy of the dump for connections that leave the tree: refuse, keep, close."""
    left_running: bool
    lineage: Lineage
    seconds: dict[str, float] = field(default_factory=dict)
    frozen_seconds: float = 0.0
    stopped_seconds: float = 0.0
    bytes_raw: int = 0
    bytes_stored: int = 0
    """All parts together."""
    bytes_shared: int = 0
    """Of these, what was not written but hard-linked from a base image."""
    allowed: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    full_created: float = 0.0
    """When the memory that was shared with the base was written whole, over all bases; `created` where nothing was
    shared, 0 where it is not known."""


def encode(manifest: Manifest) -> bytes:
    """The bytes of manifest.json: canonical JSON with the digest of the rest as its last key."""
    body = to_json(manifest)
    body["blake3"] = _digest(body)
    return json.dumps(body, indent=1, ensure_ascii=True).encode() + b"\n"


def decode(raw: bytes, where: str) -> Manifest:
    """Read manifest.json.

    Raises ImageTooNew for a format or required feature this version does not know, ImageCorrupt for
    anything that is not a whole and well-formed manifest. Hostile input is expected.
    """
    body = _parse(raw, where)
    _refuse_newer(body, where)
    digest = body.pop("blake3", None)
    try:
        if digest != _digest(body):
            raise ImageCorrupt(f"{where}: the manifest's digest does not fit its content", "copy the image again")
        _refuse_impossible_values(body)
        manifest = from_json(Manifest, _upgraded(body))
        _check_tree(manifest)
    except (FormError, RecursionError) as error:
        raise ImageCorrupt(f"{where}: {str(error)[:MAX_MESSAGE]}", "copy the image again") from None
    _check_paths(manifest, where)
    return manifest


def _parse(raw: bytes, where: str) -> dict[str, Any]:
    if len(raw) > MAX_BYTES:
        raise ImageCorrupt(f"{where}: larger than {MAX_BYTES >> 20} MiB, this is no manifest")
    try:
        body = json.loads(raw.decode("utf-8"), parse_constant=_no_number)
    except (ValueError, RecursionError):
        raise ImageCorrupt(f"{where}: not whole JSON (cut or damaged)", "copy the image again") from None
    if not isinstance(body, dict):
        raise ImageCorrupt(f"{where}: not a manifest", "name a directory that `gpuckpt dump` made")
    return body


def _no_number(word: str) -> float:
    raise ValueError(word)


def _refuse_newer(body: dict[str, Any], where: str) -> None:
    version = body.get("format")
    if not isinstance(version, int) or isinstance(version, bool) or version < OLDEST_FORMAT:
        raise ImageCorrupt(f"{where}: no format version that gpuckpt ever wrote")
    writer = str(body["gpuckpt"])[:40] if isinstance(body.get("gpuckpt"), str) else "(version unknown)"
    if version > FORMAT:
        raise ImageTooNew(
            f"{where}: image format {str(version)[:40]}, this gpuckpt reads up to {FORMAT}",
            f"install gpuckpt {writer} or newer",
        )
    requires = body.get("requires")
    named = [item for item in requires if isinstance(item, str)] if isinstance(requires, list) else []
    unknown = sorted(set(named) - KNOWN_FEATURES)
    if unknown:
        raise ImageTooNew(
            f"{where}: needs features this gpuckpt does not know: {', '.join(unknown)[:200]}",
            f"install gpuckpt {writer} or newer",
        )


UPGRADES: tuple[Any, ...] = ()
"""UPGRADES[n] turns the JSON of format n + 1 into that of format n + 2."""


def _upgraded(body: dict[str, Any]) -> dict[str, Any]:
    for upgrade in UPGRADES[body["format"] - 1 :]:
        body = upgrade(body)
    return body


def _digest(body: dict[str, Any]) -> str:
    canonical = json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()
    return blake3.blake3(canonical).hexdigest()


def _refuse_impossible_values(body: dict[str, Any]) -> None:
    """Values of the right type that no host has: they would fail deep inside, where nobody expects them.

    Raises FormError. Text must be bytes again as a file name; numbers must fit into the kernel's.
    """
    pending: list[Any] = [body]
    while pending:
        value = pending.pop()
        if isinstance(value, dict):
            pending += [*value, *value.values()]
        elif isinstance(value, list):
            pending += value
        elif isinstance(value, str):
            _refuse_impossible_text(value)
        elif isinstance(value, (int, float)) and not -MAX_NUMBER <= value <= MAX_NUMBER:
            raise FormError(f"{str(value)[:MAX_MESSAGE]} is no possible number")


def _refuse_impossible_text(text: str) -> None:
    try:
        possible = text.isascii() or bool(text.encode("utf-8", "surrogateescape"))
    except UnicodeEncodeError:
        possible = False
    if not possible or "\0" in text:
        raise FormError(f"{text[:MAX_MESSAGE]!r} is no possible text")


def _check_tree(manifest: Manifest) -> None:
    """The tree must be one that can exist, and all identities must be its own. Raises FormError."""
    ids = manifest.tree.ids
    if not ids or ids[0] != manifest.tree.root:
        raise FormError("$.tree: the root is not the first process")
    threads = [tid for process in manifest.tree.processes for tid in process.threads]
    numbers = [identity.pid for identity in ids]
    if len(set(numbers)) != len(numbers) or not all(0 < number <= MAX_PID for number in (*numbers, *threads)):
        raise FormError("$.tree.processes: impossible process ids")
    if not {*manifest.stopped, *(one.id for one in manifest.cuda), *(one.id for one in manifest.tree.cuda)} <= {*ids}:
        raise FormError("$: a process is named that is not in the tree")
    if not all(_is_possible(one.host_copies) for one in manifest.cuda):
        raise FormError("$.cuda: impossible addresses")
    if not 0 <= manifest.created < MAX_TIME:
        raise FormError("$.created: no possible time")


def _is_possible(ranges: tuple[tuple[int, int], ...]) -> bool:
    whole = all(0 <= start < end and start % SMALLEST_PAGE == end % SMALLEST_PAGE == 0 for start, end in ranges)
    return whole and len(ranges) <= MOST_COPIES


def _check_paths(manifest: Manifest, where: str) -> None:
    """No path may lead out of the image directory; none may name the manifest itself or be named twice."""
    seen: set[str] = set()
    for path in [part.path for part in manifest.parts]:
        if path in seen or path == NAME or not stays_inside(path):
            raise ImageCorrupt(
                f"{where}: the part path {path[:MAX_MESSAGE]!r} is not allowed", "do not restore this image"
            )
        seen.add(path)
    taken: set[str] = set()
    sizes = {part.path: part.size for part in manifest.parts}
    for captured in manifest.captured:
        known = captured.path not in taken and captured.part in seen
        if not known or not _may_be_captured(captured, sizes, manifest):
            raise ImageCorrupt(
                f"{where}: the captured file {captured.path[:MAX_MESSAGE]!r} is not allowed",
                "do not restore this image",
            )
        taken.add(captured.path)


_LINK_REMAP_NAME = re.compile(r"link_remap\.\d+")
MAX_OWNER = 2**32 - 1
"""This number itself means "leave it as it is" to chown(2)."""

SET_ID = stat.S_ISUID | stat.S_ISGID


def _may_be_captured(captured: CapturedFile, sizes: dict[str, int], manifest: Manifest) -> bool:
    """A restore, as root, makes this file: it must be one that the tree had, and give nobody new rights."""
    tree = manifest.tree
    names = [captured.path, *([captured.linked_to] if captured.linked_to else [])]
    owners = 0 <= captured.uid < MAX_OWNER and 0 <= captured.gid < MAX_OWNER
    if not owners or not all(_is_plain_absolute(name) for name in names):
        return False
    if captured.reason == OPEN:
        open_in_tree = any(_is_it(captured, sizes[captured.part], file) for file in tree.files)
        return open_in_tree and (not captured.linked_to or _are_one_file(captured, manifest))
    return captured.reason == LINK_REMAP and _is_link_remap(captured, tree)


def _is_it(captured: CapturedFile, size: int, file: OpenFile) -> bool:
    alike = (captured.path, captured.mode, captured.uid, captured.gid, size) == (
        file.path,
        stat.S_IMODE(file.mode),
        file.uid,
        file.gid,
        file.size,
    )
    return alike and stat.S_ISREG(file.mode) and not file.deleted and not file.mode & SET_ID


def _are_one_file(captured: CapturedFile, manifest: Manifest) -> bool:
    """It was a further name of a captured file, which has no other that it is linked to."""
    first = [one for one in manifest.captured if one.path == captured.linked_to and one.part == captured.part]
    names = {captured.path, captured.linked_to}
    inodes = {(file.device, file.inode) for file in manifest.tree.files if file.path in names}
    return bool(first) and not first[0].linked_to and first[0].reason == OPEN and len(names) == 2 and len(inodes) == 1


def _is_link_remap(captured: CapturedFile, tree: Tree) -> bool:
    """In the directory of a file of the tree, deleted or (NFS keeps a name for those) not, under a name of CRIU's."""
    path = PurePosixPath(captured.path)
    directories = {PurePosixPath(file.path).parent for file in tree.files}
    beside = not captured.linked_to or PurePosixPath(captured.linked_to).parent == path.parent
    named = _LINK_REMAP_NAME.fullmatch(path.name) is not None
    return named and beside and path.parent in directories and 0 <= captured.mode <= 0o7777


def _is_plain_absolute(path: str) -> bool:
    return path.startswith("/") and path != "/" and ".." not in PurePosixPath(path).parts


def stays_inside(path: str) -> bool:
    """True for a plain relative path of ordinary names."""
    parts = path.split("/")
    return bool(path) and "\0" not in path and all(part not in ("", ".", "..") for part in parts)


def with_notes(manifest: Manifest, *notes: str) -> Manifest:
    """The manifest with further notes."""
    return replace(manifest, notes=manifest.notes + notes)

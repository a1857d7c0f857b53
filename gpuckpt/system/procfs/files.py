"""The files a tree needs from the file system: open, mapped, executed, or its directories."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gpuckpt.model.facts import OpenFile
from gpuckpt.system.procfs.descriptors import DELETED, GPU_NAMES, OpenDescriptor, is_deleted
from gpuckpt.system.procfs.elf import build_id
from gpuckpt.system.procfs.reading import DEV_ZERO, Mapping, read_link, stat_path

if TYPE_CHECKING:
    from collections.abc import Iterable

PSEUDO = (
    "/memfd:",
    "/SYSV",
    DEV_ZERO,
    "/anon_hugepage (deleted)",
    "/secretmem",
    "/[aio]",
    "/dmabuf:",
    "/drm mm object",
    "/i915",
    "/proc/",
    *GPU_NAMES,
)
"""Mappings and links that look like paths but are kernel objects, GPU devices, or /proc itself."""

KINDS = frozenset(("file", "directory", "device", "fifo"))
BLOCK = 512
"""Unit of st_blocks, whatever the file system's own."""

Key = tuple[int, int, str]


@dataclass(slots=True)
class _Found:
    """A file while it is being collected."""

    status: os.stat_result
    path: str
    deleted: bool
    readable_at: str
    """A magic link of /proc that leads to this very file, whatever its name now leads to."""
    uses: dict[str, None] = field(default_factory=dict)
    """An ordered set: a job can hold one file a thousand times."""
    flags: int | None = None
    position: int | None = None


@dataclass(slots=True)
class FileCollector:
    """Gathers the files of several processes; one file used by many stands once."""

    found: dict[Key, _Found] = field(default_factory=dict)
    mapped: dict[tuple[str, int, str], Key | None] = field(default_factory=dict)
    """(device and inode as /proc/PID/maps has them, path) -> key: libraries are shared by all processes."""

    def add_process(self, pid: int, descriptors: Iterable[OpenDescriptor], mappings: Iterable[Mapping]) -> None:
        """Add what one process has open or mapped, and its exe, cwd and root. Distinct mappings are enough."""
        for name in ("exe", "cwd", "root"):
            self._add_link(pid, name)
        self._add_mappings(pid, mappings)
        for descriptor in descriptors:
            self._add_descriptor(pid, descriptor)

    def files(self) -> tuple[OpenFile, ...]:
        """Everything collected, by path."""
        return tuple(_open_file(self.found[key]) for key in sorted(self.found, key=lambda key: (key[2], key)))

    def _add(self, pid: int, link: str, target: str, status: os.stat_result) -> Key:
        deleted = is_deleted(pid, target, status)
        path = target.removesuffix(DELETED) if deleted else target
        key = (status.st_dev, status.st_ino, path)
        self.found.setdefault(key, _Found(status, path, deleted, link))
        return key

    def _use(self, key: Key, use: str) -> None:
        self.found[key].uses[use] = None

    def _add_link(self, pid: int, name: str) -> None:
        link = f"/proc/{pid}/{name}"
        target, status = read_link(link), stat_path(link)
        if target is not None and status is not None and not target.startswith(PSEUDO):
            self._use(self._add(pid, link, target, status), f"{pid} {name}")

    def _add_mappings(self, pid: int, mappings: Iterable[Mapping]) -> None:
        for mapping in mappings:
            key = self._mapped_file(pid, mapping) if mapping.inode and mapping.path.startswith("/") else None
            if key is not None:
                kind = " shared-write" if mapping.shared_write else " exec" if mapping.executable else ""
                self._use(key, f"{pid} map{kind}")

    def _mapped_file(self, pid: int, mapping: Mapping) -> Key | None:
        if mapping.path.startswith(PSEUDO):
            return None
        known = (mapping.device, mapping.inode, mapping.path)
        if known not in self.mapped:
            link = f"/proc/{pid}/map_files/{mapping.range}"
            status = _stat_mapped(pid, mapping)
            self.mapped[known] = None if status is None else self._add(pid, link, mapping.path, status)
        return self.mapped[known]

    def _add_descriptor(self, pid: int, descriptor: OpenDescriptor) -> None:
        fact = descriptor.fact
        if fact.kind not in KINDS or fact.target.startswith(PSEUDO):
            return
        key = self._add(pid, f"/proc/{pid}/fd/{fact.fd}", fact.target, descriptor.stat)
        self._use(key, f"{pid} fd {fact.fd}")
        file = self.found[key]
        if file.flags is None or _weight(fact.flags) > _weight(file.flags):
            file.flags, file.position = fact.flags, fact.position


def _stat_mapped(pid: int, mapping: Mapping) -> os.stat_result | None:
    """A mapped file's stat; by name where map_files is closed to us (it needs CAP_CHECKPOINT_RESTORE)."""
    try:
        return stat_path(f"/proc/{pid}/map_files/{mapping.range}")
    except PermissionError:
        status = stat_path(f"/proc/{pid}/root{mapping.path}")
        return status if status and status.st_ino == mapping.inode else None


def _weight(flags: int) -> int:
    """Of several descriptors of one file the one that matters most: written anywhere, appended to, only read."""
    if flags & os.O_ACCMODE == os.O_RDONLY or flags & os.O_PATH:
        return 0
    # CRIU leaves out the size check only for files opened O_WRONLY | O_APPEND.
    appended = flags & os.O_ACCMODE == os.O_WRONLY and flags & os.O_APPEND
    return 1 if appended else 2


def _open_file(found: _Found) -> OpenFile:
    status = found.status
    regular = stat.S_ISREG(status.st_mode)
    return OpenFile(
        path=found.path,
        uses=tuple(found.uses),
        size=status.st_size,
        mode=status.st_mode,
        mtime=status.st_mtime,
        device=status.st_dev,
        inode=status.st_ino,
        links=status.st_nlink,
        blocks_bytes=status.st_blocks * BLOCK,
        deleted=found.deleted,
        flags=found.flags,
        position=found.position,
        build_id=build_id(found.readable_at) if regular and status.st_size else None,
        uid=status.st_uid,
        gid=status.st_gid,
    )

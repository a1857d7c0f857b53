"""Control groups: where a process is, what memory it may take there, who else is there; versions 1 and 2."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from gpuckpt.model.records import dataclass
from gpuckpt.system.procfs.reading import list_names, read_text

if TYPE_CHECKING:
    from collections.abc import Iterator

V1_UNLIMITED = 1 << 62
"""memory.limit_in_bytes without a limit reads 2^63 less a page."""


@dataclass(frozen=True, slots=True)
class Membership:
    """One line of /proc/PID/cgroup. `controllers` is empty for the unified hierarchy."""

    controllers: tuple[str, ...]
    path: str

    @property
    def unified(self) -> bool:
        """The line of cgroup v2."""
        return not self.controllers


@dataclass(frozen=True, slots=True)
class CgroupMount:
    """Where a hierarchy can be seen."""

    mount_point: str
    root: str
    """The cgroup that lies at the mount point: '/' but in containers."""
    kind: str
    """'cgroup' (version 1) or 'cgroup2'."""
    options: frozenset[str]
    """Of version 1, the controllers among others."""

    def directory(self, path: str) -> str | None:
        """The directory of a cgroup, or None when it lies outside what is mounted here."""
        root = self.root.rstrip("/")
        if path != root and not path.startswith(root + "/"):
            return None
        return (self.mount_point + path[len(root) :]).rstrip("/")


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """The memory limit of one cgroup that a process is in, directly or through a child."""

    directory: str
    limit_bytes: int
    used_bytes: int | None
    """Without page cache that the kernel would drop first."""


def parse_membership(text: str) -> tuple[Membership, ...]:
    """Parse /proc/PID/cgroup: 'number:controllers:path', the path may hold colons."""
    lines = (line.split(":", 2) for line in text.split("\n") if line.count(":") >= 2)
    return tuple(Membership(tuple(filter(None, names.split(","))), path) for _, names, path in lines)


def memberships(pid: int) -> tuple[Membership, ...]:
    """The cgroups a process is in; empty when it is gone."""
    return parse_membership(read_text(f"/proc/{pid}/cgroup") or "")


def cgroup_of(pid: int) -> str:
    """The unified path, or the longest of the v1 paths where the process is in the unified root or there is none."""
    return main_path(memberships(pid))


def main_path(groups: tuple[Membership, ...]) -> str:
    """As cgroup_of, from what was read already."""
    unified = unified_path(groups)
    if unified not in {None, "/"}:
        return str(unified)
    return max((group.path for group in groups), key=len, default="")


def unified_cgroup_of(pid: int) -> str | None:
    """The cgroup v2 path of a process, as /proc shows it; None without cgroup v2."""
    return unified_path(memberships(pid))


def unified_path(groups: tuple[Membership, ...]) -> str | None:
    """The path of the unified hierarchy among these."""
    return next((group.path for group in groups if group.unified), None)


def parse_cgroup_mounts(text: str) -> tuple[CgroupMount, ...]:
    """The cgroup mounts of a /proc/PID/mountinfo (proc_pid_mountinfo(5))."""
    return tuple(_cgroup_mounts(text))


def _cgroup_mounts(text: str) -> Iterator[CgroupMount]:
    for line in text.split("\n"):
        mount, _, source = line.partition(" - ")
        fields, of_type = mount.split(" "), source.split(" ")
        if len(fields) >= 6 and len(of_type) >= 3 and of_type[0] in {"cgroup", "cgroup2"}:
            options = frozenset((*fields[5].split(","), *of_type[2].split(",")))
            yield CgroupMount(_unescape(fields[4]), _unescape(fields[3]), of_type[0], options)


def _unescape(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)


def cgroup_mounts() -> tuple[CgroupMount, ...]:
    """The cgroup mounts that this process sees."""
    return parse_cgroup_mounts(read_text("/proc/self/mountinfo") or "")


def cgroup2_mount() -> str | None:
    """The mount point of cgroup v2 (on hybrid hosts often /sys/fs/cgroup/unified), or None."""
    return next((mount.mount_point for mount in cgroup_mounts() if mount.kind == "cgroup2"), None)


def pids_in_cgroup(path: str) -> list[int]:
    """Pids in a cgroup and the cgroups below it, ascending. `path` is its directory; empty when it is not there."""
    found: set[int] = set()
    for directory in (Path(path), *_below(Path(path))):
        try:
            text = read_text(str(directory / "cgroup.procs")) or ""
        except OSError:
            continue  # a threaded cgroup lists its processes in its parent
        found.update(int(line) for line in text.split())
    return sorted(found - {0})  # 0 stands for a process of another pid namespace


def _below(directory: Path) -> Iterator[Path]:
    for name in list_names(str(directory)):
        child = directory / name
        if child.is_dir():
            yield child
            yield from _below(child)


def memory_limits(pid: int) -> tuple[MemoryLimit, ...]:
    """Every memory limit above a process, innermost first; empty when nothing limits it."""
    return tuple(_memory_limits(memberships(pid), cgroup_mounts()))


def _memory_limits(groups: tuple[Membership, ...], mounts: tuple[CgroupMount, ...]) -> Iterator[MemoryLimit]:
    for group in groups:
        mount = next((mount for mount in mounts if _shows_memory(mount, group)), None)
        if mount is None:
            continue
        names = ("memory.max", "memory.current")
        if mount.kind == "cgroup":
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
        yield from _limits_upwards(mount, group.path, names)


def _shows_memory(mount: CgroupMount, group: Membership) -> bool:
    if group.unified:
        return mount.kind == "cgroup2"
    return mount.kind == "cgroup" and "memory" in group.controllers and "memory" in mount.options


def _limits_upwards(mount: CgroupMount, path: str, names: tuple[str, str]) -> Iterator[MemoryLimit]:
    while True:
        directory = mount.directory(path)
        if directory is None:
            return
        limit = _number(f"{directory}/{names[0]}")
        if limit is not None and limit < V1_UNLIMITED:
            yield MemoryLimit(directory, limit, _used(directory, names[1]))
        if path == "/":
            return
        path = path.rpartition("/")[0] or "/"


def _used(directory: str, name: str) -> int | None:
    """Bytes in use that the kernel cannot drop: page cache that nobody has touched lately gives way."""
    used = _number(f"{directory}/{name}")
    return None if used is None else max(0, used - _idle_cache(read_text(f"{directory}/memory.stat") or ""))


def _idle_cache(text: str) -> int:
    """inactive_file of a memory.stat; in version 1 the total with the cgroups below."""
    values = dict(line.split(" ", 1) for line in text.splitlines() if " " in line)
    return int(values.get("total_inactive_file", values.get("inactive_file", "0")))


def _number(path: str) -> int | None:
    text = (read_text(path) or "").strip()
    return int(text) if text.isdigit() else None

"""Reading single files of /proc: whole, as bytes, and None when the process has gone meanwhile.

Names and paths are bytes for the kernel and become text with surrogateescape, so that a path which is
no UTF-8 can be handed back to the system unchanged. Permission errors are raised, never taken for
"nothing there": a fact that could not be read must not look like a fact.
"""

# ruff: noqa: PTH110, PTH115, PTH116, PTH123, PTH208
# A tree has thousands of links and mappings: a Path object for each would cost more than the read.
from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from gpuckpt.model.records import dataclass

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

GONE = (FileNotFoundError, ProcessLookupError, NotADirectoryError)
"""How the kernel says that a process ended: no such entry, or ESRCH from a file opened before its end."""

DEV_ZERO = "/dev/zero (deleted)"
"""What a mapping of shared anonymous memory is called."""

PF_KTHREAD = 0x00200000
"""include/linux/sched.h: set in field 9 of /proc/PID/stat of kernel threads."""


def decode(raw: bytes) -> str:
    """Text of a kernel string, every byte kept."""
    return os.fsdecode(raw)


def read_bytes(path: str) -> bytes | None:
    """A whole file of /proc or /sys, or None when it is not there. Raises PermissionError and other OSErrors."""
    try:
        with open(path, "rb", buffering=0) as file:
            return file.read()
    except GONE:
        return None


def read_text(path: str) -> str | None:
    """As read_bytes, decoded."""
    raw = read_bytes(path)
    return None if raw is None else decode(raw)


def read_link(path: str) -> str | None:
    """The text of a symbolic link, or None when it is not there."""
    try:
        return os.readlink(path)
    except GONE:
        return None


def stat_path(path: str) -> os.stat_result | None:
    """What a path leads to (through /proc's magic links too), or None."""
    try:
        return os.stat(path)
    except GONE:
        return None


def stat_link(path: str) -> os.stat_result | None:
    """The link itself, or None."""
    try:
        return os.lstat(path)
    except GONE:
        return None


def exists(path: str) -> bool:
    """There is something at this path."""
    return os.path.exists(path)


def list_names(path: str) -> list[str]:
    """The names in a directory; empty when it is not there."""
    try:
        return os.listdir(path)
    except GONE:
        return []


def list_numbers(path: str) -> list[int]:
    """The numeric names in a directory, ascending: pids, threads or descriptors."""
    return sorted(int(name) for name in list_names(path) if name.isdigit())


def all_pids() -> list[int]:
    """Every process of the host (no threads), ascending."""
    return list_numbers("/proc")


@dataclass(frozen=True, slots=True)
class Stat:
    """The fields of /proc/PID/stat that are used here (proc_pid_stat(5))."""

    pid: int
    comm: str
    state: str
    ppid: int
    pgid: int
    sid: int
    tty: int
    foreground_pgid: int
    kernel_thread: bool
    cpu_ticks: int
    start_ticks: int


def parse_stat(raw: bytes) -> Stat | None:
    """Parse /proc/PID/stat; None when it is empty or cut short."""
    # comm may hold blanks and brackets, so it ends at the last ')'.
    opening, closing = raw.find(b"("), raw.rfind(b")")
    fields = raw[closing + 1 :].split()
    if opening < 0 or closing < opening or len(fields) < 20:
        return None
    return Stat(
        pid=int(raw[:opening]),
        comm=decode(raw[opening + 1 : closing]),
        state=fields[0].decode(),
        ppid=int(fields[1]),
        pgid=int(fields[2]),
        sid=int(fields[3]),
        tty=int(fields[4]),
        foreground_pgid=int(fields[5]),
        kernel_thread=bool(int(fields[6]) & PF_KTHREAD),
        cpu_ticks=int(fields[11]) + int(fields[12]),
        start_ticks=int(fields[19]),
    )


def stat_of(pid: int) -> Stat | None:
    """/proc/PID/stat, or None when there is no such process."""
    raw = read_bytes(f"/proc/{pid}/stat")
    return None if raw is None else parse_stat(raw)


def parse_status(raw: bytes) -> dict[str, str]:
    """The 'Name: value' lines of /proc/PID/status, values stripped."""
    pairs = (line.split(b":", 1) for line in raw.split(b"\n") if b":" in line)
    return {decode(name): decode(value.strip()) for name, value in pairs}


def status_of(pid: int) -> dict[str, str] | None:
    """/proc/PID/status as a mapping, or None when there is no such process."""
    raw = read_bytes(f"/proc/{pid}/status")
    return parse_status(raw) if raw else None


def size_in(status: dict[str, str], name: str) -> int:
    """A size of /proc/PID/status ('1234 kB') in bytes; 0 where the line is missing (zombies, kernel threads)."""
    value = status.get(name, "0 kB").split()
    return int(value[0]) * 1024


def comm_of(pid: int) -> str:
    """The name of a process, or '' when it is gone."""
    stat = stat_of(pid)
    return stat.comm if stat else ""


def program_of(pid: int) -> str:
    """The name of the program a process runs, which does not change as its own name may; '' when it is gone."""
    exe = read_link(f"/proc/{pid}/exe") or ""
    return exe.removesuffix(" (deleted)").rpartition("/")[2] or comm_of(pid)


def descriptor_path(descriptor: int) -> Path:
    """A name under which every process of this host reaches what we have open, wherever it lies by now."""
    return Path(f"/proc/{os.getpid()}/fd/{descriptor}")


def inherited_path(descriptor: int) -> Path:
    """A name under which a program reaches a descriptor that it was started with, whoever it runs as."""
    return Path(f"/proc/self/fd/{descriptor}")


def own_place() -> Path:
    """Where the kernel tells of this process."""
    return Path(f"/proc/{os.getpid()}")


def words_for(pid: int) -> str:
    """'1234 bash', for messages."""
    return f"{pid} {comm_of(pid)}".rstrip()


class Mapping(NamedTuple):
    """One line of /proc/PID/maps. `path` is '' for anonymous memory; deleted files end in ' (deleted)'.

    A named tuple, for there can be 65,530 of them in a process.
    """

    start: int
    end: int
    perms: str
    offset: int
    device: str
    """'fd:01', as the line has it: on overlayfs and btrfs not the st_dev that stat shows."""
    inode: int
    path: str

    @property
    def shared_write(self) -> bool:
        """Writes go to the file."""
        return self.perms[3] == "s" and self.perms[1] == "w"

    @property
    def executable(self) -> bool:
        """The file holds code: a program or a library."""
        return self.perms[2] == "x"

    @property
    def range(self) -> str:
        """The name of this mapping in /proc/PID/map_files."""
        return f"{self.start:x}-{self.end:x}"


def parse_maps(raw: bytes) -> Iterator[Mapping]:
    """Parse /proc/PID/maps. A newline in a path stays as the kernel writes it, octal."""
    # Split on newlines only: splitlines would also break at a carriage return inside a path.
    for line in decode(raw).split("\n"):
        fields = line.split(None, 5)
        if len(fields) < 5:
            continue
        start, _, end = fields[0].partition("-")
        path = fields[5] if len(fields) == 6 else ""
        yield Mapping(int(start, 16), int(end, 16), fields[1], int(fields[2], 16), fields[3], int(fields[4]), path)


def distinct(mappings: Iterable[Mapping]) -> list[Mapping]:
    """The first mapping of each named file, shared writable and executable ones apart: a library or a device has many.

    Shared anonymous memory is left out: every piece of it is a file of its own, and CUDA has thousands.
    """
    first: dict[tuple[str, int, str, bool, bool], Mapping] = {}
    for one in mappings:
        if one.path and one.path != DEV_ZERO:
            first.setdefault((one.path, one.inode, one.device, one.shared_write, one.executable), one)
    return list(first.values())


def maps_of(pid: int) -> list[Mapping]:
    """The mappings of a process, ascending; empty for zombies, kernel threads and processes that are gone.

    A path that may hold a newline is read again from map_files: the kernel escapes newlines here and nothing else.
    """
    raw = read_bytes(f"/proc/{pid}/maps") or b""
    return [_unescaped(pid, mapping) if "\\012" in mapping.path else mapping for mapping in parse_maps(raw)]


def _unescaped(pid: int, mapping: Mapping) -> Mapping:
    path = read_link(f"/proc/{pid}/map_files/{mapping.range}")
    return mapping if path is None else mapping._replace(path=path)

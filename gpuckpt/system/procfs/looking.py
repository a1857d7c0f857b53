"""Single questions that checks ask about processes, files, ports and addresses of this host."""

from __future__ import annotations

import errno
import os
import re
import socket
import stat
from typing import TYPE_CHECKING

from gpuckpt.model.facts import OpenFile
from gpuckpt.system.procfs.elf import build_id
from gpuckpt.system.procfs.reading import (
    all_pids,
    list_numbers,
    maps_of,
    read_bytes,
    read_link,
    read_text,
    size_in,
    stat_link,
    stat_path,
    status_of,
    words_for,
)
from gpuckpt.system.procfs.sockettables import INET_TABLES, parse_inet, parse_unix

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator

SPECIAL = re.compile(r"/secretmem|anon_inode:\[(?!io_uring)")
WATCH = re.compile(r"^inotify .*\bino:(\w+) sdev:(\w+)", re.MULTILINE)
BLOCK = 512
ANY_ADDRESS = ("0.0.0.0", "[::]")  # noqa: S104 - compared with, not bound to


def kernel_watches(pids: Iterable[int]) -> tuple[str, ...]:
    """Watches (inotify) in /proc or /sys, which CRIU cannot save: '1234 fd 5 watches something in /proc'."""
    places = {_kernel_device(seen.st_dev): place for place in ("/proc", "/sys") if (seen := stat_path(place))}
    return tuple(sentence for pid in pids for sentence in _watches(pid, places))


def _kernel_device(device: int) -> int:
    """A device number as the kernel itself prints it: major shifted by 20 (include/linux/kdev_t.h)."""
    return os.major(device) << 20 | os.minor(device)


def _watches(pid: int, places: dict[int, str]) -> Iterator[str]:
    for fd in list_numbers(f"/proc/{pid}/fd"):
        if read_link(f"/proc/{pid}/fd/{fd}") not in ("anon_inode:inotify", "inotify"):
            continue
        for _, device in WATCH.findall(read_text(f"/proc/{pid}/fdinfo/{fd}") or ""):
            if (place := places.get(int(device, 16))) is not None:
                yield f"{pid} fd {fd} watches something in {place}"


def special_mappings(pids: Iterable[int]) -> tuple[str, ...]:
    """Mappings of kernel objects that CRIU cannot save: '1234 /secretmem (deleted)'."""
    return tuple(f"{pid} {mapping.path}" for pid in pids for mapping in maps_of(pid) if SPECIAL.match(mapping.path))


def environment_values(pid: int, prefix: str) -> dict[str, str]:
    """The variables of a process whose names begin with `prefix`, with values. They never go into an image."""
    pairs = ((read_bytes(f"/proc/{pid}/environ") or b"").decode("utf-8", "surrogateescape")).split("\0")
    return {name: value for name, _, value in (pair.partition("=") for pair in pairs) if name.startswith(prefix)}


def file_here(path: str) -> OpenFile | None:
    """What lies at a path on this host now; None where nothing does."""
    seen = stat_path(path)
    if seen is None:
        return None
    return OpenFile(
        path=path,
        uses=(),
        size=seen.st_size,
        mode=seen.st_mode,
        mtime=seen.st_mtime,
        device=seen.st_dev,
        inode=seen.st_ino,
        links=seen.st_nlink,
        blocks_bytes=seen.st_blocks * BLOCK,
        build_id=build_id(path) if stat.S_ISREG(seen.st_mode) else None,
        uid=seen.st_uid,
        gid=seen.st_gid,
        resolved="" if (real := os.path.realpath(path)) == path else real,
    )


def ports_in_use(wanted: Iterable[str]) -> dict[str, str]:
    """Of 'tcp 0.0.0.0:8000', 'udp [::1]:53' those that somebody here has bound -> by whom."""
    asked = list(wanted)
    return dict(_taken(asked)) if asked else {}


def _taken(asked: list[str]) -> Iterator[tuple[str, str]]:
    names = {"tcp": "stream", "udp": "dgram"}
    for table, (_, kind) in INET_TABLES.items():
        rows = [row for row in parse_inet(table, read_text(f"/proc/thread-self/net/{table}") or "") if row.inode]
        for port in asked:
            protocol, _, endpoint = port.partition(" ")
            holder = next((r for r in rows if names[protocol] == kind and _collides(r.local, endpoint)), None)
            if holder is not None and holder.state in ("listen", "unconnected"):
                yield port, _who_has_socket(holder.inode)


def unix_names_in_use(wanted: Collection[str]) -> dict[str, str]:
    """Of these names of unix sockets ('/run/x.sock', '@abstract') those that a socket here is bound to -> by whom.

    Sockets of other network namespaces are not seen.
    """
    if not wanted:
        return {}
    rows = parse_unix(read_text("/proc/thread-self/net/unix") or "")
    found = {row.own: row.inode for row in rows if row.own in wanted}
    return {name: _who_has_socket(inode) for name, inode in found.items()}


def _collides(one: str, other: str) -> bool:
    """The same port, and the same address or any address on one side."""
    address, _, port = one.rpartition(":")
    other_address, _, other_port = other.rpartition(":")
    return port == other_port and (address == other_address or bool({address, other_address} & set(ANY_ADDRESS)))


def _who_has_socket(inode: int) -> str:
    wanted = f"socket:[{inode}]"
    for pid in list_numbers("/proc"):
        if _has_open(pid, wanted):
            return words_for(pid)
    return "a process that cannot be seen from here"


def _has_open(pid: int, link: str) -> bool:
    """Whether a process has this open; False where it cannot be looked into, which happens to root too."""
    try:
        return any(read_link(f"/proc/{pid}/fd/{fd}") == link for fd in list_numbers(f"/proc/{pid}/fd"))
    except PermissionError:
        return False


def writers_of(paths: Collection[str]) -> dict[str, str]:
    """Of these files, under whatever name, those that a process here has open for writing -> '812 bash', the first."""
    wanted = {(seen.st_dev, seen.st_ino): path for path in paths if (seen := stat_path(path))}
    found: dict[str, str] = {}
    if not wanted:
        return found
    for pid in all_pids():
        for seen in _written_by(pid):
            path = wanted.get((seen.st_dev, seen.st_ino))
            if path is not None:
                found.setdefault(path, words_for(pid))
    return found


def _written_by(pid: int) -> Iterator[os.stat_result]:
    try:
        for fd in list_numbers(f"/proc/{pid}/fd"):
            # The permission bits of the link say how the descriptor was opened (proc_pid_fd(5)).
            link = stat_link(f"/proc/{pid}/fd/{fd}")
            file = stat_path(f"/proc/{pid}/fd/{fd}") if link and link.st_mode & stat.S_IWUSR else None
            if file is not None and stat.S_ISREG(file.st_mode):
                yield file
    except PermissionError:
        return


def missing_addresses(wanted: Iterable[str]) -> tuple[str, ...]:
    """Addresses this host does not have: the kernel says so when one tries to bind to them."""
    return tuple(address for address in wanted if not _has_address(address))


def _has_address(address: str) -> bool:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as trial:
        try:
            trial.bind((address, 0))
        except OSError as error:
            return error.errno != errno.EADDRNOTAVAIL
    return True


def address_space_room(pid: int) -> int | None:
    """Bytes a process may still map under RLIMIT_AS; None without such a limit."""
    for line in (read_text(f"/proc/{pid}/limits") or "").splitlines():
        if line.startswith("Max address space"):
            limit = line.split()[3]
            size = size_in(status_of(pid) or {}, "VmSize")
            return max(0, int(limit) - size) if limit.isdigit() else None
    return None


def security_modules() -> str:
    """The security module that gives processes labels here: 'apparmor', 'selinux' or '', as criuformat names it."""
    active = (read_text("/sys/kernel/security/lsm") or "").split(",")
    return next((name for name in ("selinux", "apparmor") if name in active), "")

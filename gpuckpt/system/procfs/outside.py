"""Who else on this host holds the other end: one scan of the descriptors of all processes outside a tree."""

from __future__ import annotations

import ctypes
import os
import select
import stat
from dataclasses import field
from typing import TYPE_CHECKING

from gpuckpt.model.records import dataclass
from gpuckpt.system.procfs.reading import all_pids, list_names, read_link, read_text, stat_link, words_for

if TYPE_CHECKING:
    from collections.abc import Collection

MASTER_LINKS = frozenset(("/dev/ptmx", "/dev/pts/ptmx", "/ptmx"))
PIDFD_GETFD = 438
"""The system call's number on every architecture (since Linux 5.6); libc has no name for it before glibc 2.36."""


@dataclass(frozen=True, slots=True)
class Holder:
    """A descriptor of a process outside the tree."""

    pid: int
    fd: int
    readable: bool
    writable: bool


@dataclass(slots=True)
class Outside:
    """Outside holders of the objects that were asked for."""

    by_link: dict[str, list[Holder]] = field(default_factory=dict)
    """'pipe:[12]' or 'socket:[12]' -> holders."""
    masters: dict[int, list[Holder]] = field(default_factory=dict)
    """Number of a pty slave -> holders of its master."""

    def who(self, link: str) -> str:
        """'812 dbus-daemon' for the first holder of an object, or ''."""
        holders = self.by_link.get(link)
        return words_for(holders[0].pid) if holders else ""


def find_outside(tree_pids: Collection[int], links: Collection[str], *, masters: bool) -> Outside:
    """Look for holders of these links, and of pty masters, among all processes but the tree's own."""
    found = Outside()
    if not links and not masters:
        return found
    for pid in all_pids():
        if pid in tree_pids:
            continue
        try:
            _scan(pid, links, found, masters=masters)
        except PermissionError:
            # Somebody else's process, and we are not root: it stays unknown.
            continue
    return found


def _scan(pid: int, links: Collection[str], found: Outside, *, masters: bool) -> None:
    directory = f"/proc/{pid}/fd"
    for name in list_names(directory):
        link = read_link(f"{directory}/{name}")
        if link in links:
            holder = _holder(pid, name)
            if link is not None and holder is not None:
                found.by_link.setdefault(link, []).append(holder)
        elif masters and link in MASTER_LINKS:
            index, holder = _slave_number(pid, name), _holder(pid, name)
            if index is not None and holder is not None:
                found.masters.setdefault(index, []).append(holder)


def _holder(pid: int, fd: str) -> Holder | None:
    # The permission bits of the link in /proc/PID/fd say how the descriptor was opened (proc_pid_fd(5)).
    status = stat_link(f"/proc/{pid}/fd/{fd}")
    if status is None:
        return None
    return Holder(pid, int(fd), bool(status.st_mode & stat.S_IRUSR), bool(status.st_mode & stat.S_IWUSR))


def _slave_number(pid: int, fd: str) -> int | None:
    for line in (read_text(f"/proc/{pid}/fdinfo/{fd}") or "").split("\n"):
        name, _, value = line.partition(":")
        if name == "tty-index":
            return int(value)
    return None


def other_end_is_open(pid: int, fd: int) -> bool | None:
    """Whether anybody at all, seen or unseen by us, holds the other end of a pipe; None when it cannot be found out.

    Holders in another pid namespace are in no /proc of ours. The descriptor is borrowed with pidfd_getfd and
    polled: an end without the other reports an error or a hang-up. Nothing is read and nobody is woken.
    """
    try:
        borrowed = _borrow(pid, fd)
    except OSError:
        return None
    try:
        poller = select.poll()
        poller.register(borrowed, 0)
        return not poller.poll(0)
    finally:
        os.close(borrowed)


def _borrow(pid: int, fd: int) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    handle = os.pidfd_open(pid)
    try:
        borrowed = int(libc.syscall(PIDFD_GETFD, handle, fd, 0))
    finally:
        os.close(handle)
    if borrowed < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return borrowed

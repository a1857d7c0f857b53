"""Pipes, sockets and terminals of a tree, and whether their other end is inside it."""

from __future__ import annotations

import os
from dataclasses import field
from typing import TYPE_CHECKING, Literal

from gpuckpt.model.facts import Pipe, Socket, Stdio
from gpuckpt.model.records import dataclass
from gpuckpt.system.procfs.descriptors import DELETED, PTMX, OpenDescriptor, is_pty_slave, slave_number
from gpuckpt.system.procfs.outside import Outside, find_outside, other_end_is_open
from gpuckpt.system.procfs.reading import read_link, words_for
from gpuckpt.system.procfs.sockettables import NetTables, Row, read_tables, row_from_protocol

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    Opened = Mapping[int, Sequence[OpenDescriptor]]
    """pid -> its descriptors."""

NO_OTHER_END = frozenset(("listen", "unconnected", "closed"))


@dataclass(frozen=True, slots=True)
class End:
    """One descriptor of the tree."""

    pid: int
    descriptor: OpenDescriptor

    @property
    def holder(self) -> str:
        """'1234 fd 5'."""
        return f"{self.pid} fd {self.descriptor.fact.fd}"


@dataclass(frozen=True, slots=True)
class Ends:
    """What a tree talks through."""

    sockets: tuple[Socket, ...]
    pipes: tuple[Pipe, ...]
    stdio: tuple[Stdio, ...]
    inner_terminals: frozenset[int]
    """Numbers of the pty slaves whose master the tree holds."""


def find_ends(opened: Opened) -> Ends:
    """Look at all descriptors of a tree, and once at everybody else's."""
    groups = _Groups.of(opened)
    tables = _Tables(opened)
    lines = [line for inode, ends in groups.sockets.items() if (line := _line(inode, ends, tables))]
    links = {f"pipe:[{inode}]" for inode in groups.pipes}
    links |= {f"socket:[{line.far_inode}]" for line in lines if line.far_inode}
    outside = find_outside(opened.keys(), links, masters=bool(groups.outer_ttys()))
    sockets = tuple(_socket(line, groups, outside) for line in lines)
    pipes = tuple(_pipe(inode, ends, outside) for inode, ends in groups.pipes.items())
    stdio = (*_pipe_stdio(pipes, groups), *_socket_stdio(sockets, groups), *_tty_stdio(groups, outside))
    return Ends(sockets, pipes, tuple(stdio), frozenset(groups.masters))


@dataclass(slots=True)
class _Groups:
    """The tree's descriptors by the object they lead to."""

    pipes: dict[int, list[End]] = field(default_factory=dict)
    sockets: dict[int, list[End]] = field(default_factory=dict)
    ttys: dict[tuple[int, int], list[End]] = field(default_factory=dict)
    """(st_rdev, st_dev) -> descriptors; masters are not here."""
    masters: set[int] = field(default_factory=set)
    """Numbers of the pty slaves whose master the tree holds."""

    @classmethod
    def of(cls, opened: Opened) -> _Groups:
        groups = cls()
        for pid, descriptors in opened.items():
            for descriptor in descriptors:
                groups.add(End(pid, descriptor))
        return groups

    def add(self, end: End) -> None:
        fact = end.descriptor.fact
        if fact.kind == "pipe":
            self.pipes.setdefault(fact.inode, []).append(end)
        elif fact.kind == "socket":
            self.sockets.setdefault(fact.inode, []).append(end)
        elif fact.kind == "tty" and fact.device != PTMX:
            self.ttys.setdefault((fact.device, end.descriptor.stat.st_dev), []).append(end)
        elif end.descriptor.tty_index is not None:
            self.masters.add(end.descriptor.tty_index)

    def outer_ttys(self) -> list[list[End]]:
        """Terminals whose other end is not the tree's: a pty with an outside master, or a real one."""
        return [ends for ends in self.ttys.values() if self._is_outer(ends[0])]

    def _is_outer(self, end: End) -> bool:
        fact = end.descriptor.fact
        if not is_pty_slave(fact.device):
            return True
        # A slave whose master was closed loses its name: there is no other end.
        return slave_number(fact.device) not in self.masters and not fact.target.endswith(DELETED)


class _Tables:
    """The socket tables of the tree's network namespaces, each read once."""

    def __init__(self, opened: Opened) -> None:
        self._by_namespace: dict[str, NetTables] = {}
        self._of_pid: dict[int, NetTables] = {}
        own = read_link("/proc/thread-self/ns/net")
        for pid, descriptors in opened.items():
            if any(descriptor.fact.kind == "socket" for descriptor in descriptors):
                self._read(pid, own)

    def _read(self, pid: int, own: str | None) -> None:
        namespace = read_link(f"/proc/{pid}/ns/net")
        if namespace is None:
            return
        if namespace not in self._by_namespace:
            where = None if namespace == own else f"/proc/{pid}/ns/net"
            self._by_namespace[namespace] = read_tables(pid, where)
        self._of_pid[pid] = self._by_namespace[namespace]

    def find(self, inode: int, end: End) -> tuple[Row, NetTables] | None:
        """A socket's row; None when it was closed meanwhile. A process can hold sockets of other namespaces."""
        own = self._of_pid.get(end.pid, NetTables())
        for tables in (own, *self._by_namespace.values()):
            if inode in tables.rows:
                return tables.rows[inode], tables
        path = f"/proc/{end.pid}/fd/{end.descriptor.fact.fd}"
        if read_link(path) != end.descriptor.fact.target:
            return None
        return row_from_protocol(inode, _protocol(path)), own


def _protocol(path: str) -> str:
    try:
        return os.getxattr(path, "system.sockprotoname").rstrip(b"\0").decode()
    except OSError:
        return ""


@dataclass(frozen=True, slots=True)
class _Line:
    """A socket of the tree and the candidates for its other end."""

    row: Row
    ends: list[End]
    far: tuple[int, ...]
    """Inodes, of which one in the tree makes it an inner connection."""
    remote: str
    known: bool
    """It was possible to ask for the other end."""

    @property
    def far_inode(self) -> int:
        return self.far[0] if self.far else 0

    def inside(self, inodes: Iterable[int]) -> bool:
        if self.row.state == "unknown":
            return False
        if self.row.state in NO_OTHER_END and not self.far:
            return True
        if self.row.family == "unix" and self.known and not self.far:
            return True  # the peer was closed
        return any(inode in inodes for inode in self.far)


def _line(inode: int, ends: list[End], tables: _Tables) -> _Line | None:
    found = tables.find(inode, ends[0])
    if found is None:
        return None
    row, net = found
    if row.family == "unix":
        far = _unix_far(row, net)
        named = net.rows.get(far[0]) if far else None
        return _Line(row, ends, far, named.local if named else "", net.unix is not None)
    return _Line(row, ends, _inet_far(row, net), row.remote, known=True)


def _unix_far(row: Row, net: NetTables) -> tuple[int, ...]:
    if net.unix is None:
        return ()
    far = net.unix.peers.get(row.inode, 0) or net.unix.waiting.get(row.inode, 0)
    return (far,) if far else ()


def _inet_far(row: Row, net: NetTables) -> tuple[int, ...]:
    inode = net.other_end(row)
    if inode is None:
        return ()
    # 0: connected, but not accepted yet; then the end belongs to whoever listens there.
    return (inode,) if inode else tuple(net.listeners.get(row.other.rpartition(":")[2], ()))


def _socket(line: _Line, groups: _Groups, outside: Outside) -> Socket:
    row = line.row
    inside = line.inside(groups.sockets)
    return Socket(
        inode=row.inode,
        family=row.family,
        type=row.type,
        state="connected" if row.family == "unix" and line.far else row.state,
        local=row.local,
        remote=line.remote,
        owners=tuple(end.holder for end in line.ends),
        peer_inode=line.far_inode,
        peer="" if inside else outside.who(f"socket:[{line.far_inode}]"),
        inside=inside,
    )


def _pipe(inode: int, ends: list[End], outside: Outside) -> Pipe:
    reads = any(end.descriptor.readable for end in ends)
    writes = any(end.descriptor.writable for end in ends)
    # Only the opposite end counts: who merely shares ours takes nothing away from the conversation.
    partners = [
        holder
        for holder in outside.by_link.get(f"pipe:[{inode}]", ())
        if (reads and holder.writable) or (writes and holder.readable)
    ]
    unseen = not partners and not (reads and writes) and _is_held_unseen(ends[0])
    return Pipe(
        inode=inode,
        owners=tuple(end.holder for end in ends),
        inside=not partners and not unseen,
        peer=words_for(partners[0].pid) if partners else "",
    )


def _is_held_unseen(end: End) -> bool:
    """Somebody holds the other end whom our /proc does not show, as outside the container we are in."""
    return other_end_is_open(end.pid, end.descriptor.fact.fd) is True


def _pipe_stdio(pipes: Iterable[Pipe], groups: _Groups) -> list[Stdio]:
    return [
        _stdio("pipe", f"pipe:[{pipe.inode}]", groups.pipes[pipe.inode], pipe.peer)
        for pipe in pipes
        if not pipe.inside and _is_stdio(groups.pipes[pipe.inode])
    ]


def _socket_stdio(sockets: Iterable[Socket], groups: _Groups) -> list[Stdio]:
    """Unix sockets only: a TCP connection at fd 0-2 is a connection like any other for CRIU."""
    return [
        _stdio("socket", f"socket:[{socket.inode}]", groups.sockets[socket.inode], socket.peer)
        for socket in sockets
        if socket.family == "unix" and not socket.inside and _is_stdio(groups.sockets[socket.inode])
    ]


def _tty_stdio(groups: _Groups, outside: Outside) -> list[Stdio]:
    return [
        _stdio("tty", _tty_key(ends[0]), ends, _master_holder(ends[0], outside))
        for ends in groups.outer_ttys()
        if _is_stdio(ends)
    ]


def _tty_key(end: End) -> str:
    # CRIU compares with its own "tty[%lx:%lx]" of st_rdev and st_dev (criu/tty.c, get_tty_driver).
    return f"tty[{end.descriptor.fact.device:x}:{end.descriptor.stat.st_dev:x}]"


def _master_holder(end: End, outside: Outside) -> str:
    holders = outside.masters.get(slave_number(end.descriptor.fact.device))
    return words_for(holders[0].pid) if holders else ""


def _is_stdio(ends: Iterable[End]) -> bool:
    return any(end.descriptor.fact.fd <= 2 for end in ends)


def _stdio(kind: Literal["pipe", "socket", "tty"], key: str, ends: Sequence[End], peer: str) -> Stdio:
    return Stdio(
        fd=min(end.descriptor.fact.fd for end in ends),
        kind=kind,
        key=key,
        holders=tuple(end.holder for end in ends),
        writable=any(end.descriptor.writable for end in ends),
        peer=peer,
    )

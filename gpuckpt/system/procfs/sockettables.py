"""Parsers of /proc/net: sockets by inode, and which TCP or UDP socket is the other end of which."""

from __future__ import annotations

import socket
import sys
from dataclasses import field
from typing import TYPE_CHECKING

from gpuckpt.model.records import dataclass
from gpuckpt.system.procfs.reading import read_text
from gpuckpt.system.procfs.unixdiag import UnixPeers, unix_peers

if TYPE_CHECKING:
    from collections.abc import Iterator

TCP_STATES = {
    "01": "established",
    "02": "syn-sent",
    "03": "syn-received",
    "04": "fin-wait-1",
    "05": "fin-wait-2",
    "06": "time-wait",
    "07": "closed",
    "08": "close-wait",
    "09": "last-ack",
    "0A": "listen",
    "0B": "closing",
    "0C": "syn-received",
}
"""include/net/tcp_states.h."""

INET_TABLES = {
    "tcp": ("inet", "stream"),
    "tcp6": ("inet6", "stream"),
    "udp": ("inet", "dgram"),
    "udp6": ("inet6", "dgram"),
    "udplite": ("inet", "dgram"),
    "udplite6": ("inet6", "dgram"),
    "raw": ("inet", "raw"),
    "raw6": ("inet6", "raw"),
    "icmp": ("inet", "dgram"),
    "icmp6": ("inet6", "dgram"),
}

UNIX_TYPES = {"0001": "stream", "0002": "dgram", "0005": "seqpacket"}
_UNIX_STATES = {"03": "connected"}
_DATAGRAM_STATES = {True: "established", False: "unconnected"}
UNIX_LISTENS = 0x10000
"""__SO_ACCEPTCON of include/linux/net.h in the Flags column."""
V4_MAPPED = "0000000000000000FFFF0000"
"""::ffff:0:0/96 as the kernel prints it on little-endian machines."""


@dataclass(frozen=True, slots=True)
class Row:
    """One socket of a table of /proc/net. Addresses stay as the kernel prints them until somebody asks for words.

    A busy host has 100,000 connections, a tree a few.
    """

    inode: int
    family: str
    type: str
    state: str
    own: str
    other: str = ""
    pair: tuple[str, str, str] | None = None
    """(type, own, other), IPv4 in IPv6 reduced to IPv4, for connected TCP and UDP sockets."""

    @property
    def local(self) -> str:
        """'127.0.0.1:80', a unix socket's path, or ''."""
        return self._in_words(self.own)

    @property
    def remote(self) -> str:
        """The other end's address, or ''."""
        return self._in_words(self.other)

    def _in_words(self, text: str) -> str:
        return address(text) if text and self.family in {"inet", "inet6"} else text


@dataclass(slots=True)
class NetTables:
    """All sockets of one network namespace."""

    rows: dict[int, Row] = field(default_factory=dict)
    by_pair: dict[tuple[str, str, str], int] = field(default_factory=dict)
    """(type, own, other) -> inode; 0 for a connection that nobody has accepted yet."""
    listeners: dict[str, list[int]] = field(default_factory=dict)
    """TCP port in hex -> inodes of the sockets that listen on it."""
    unix: UnixPeers | None = None

    def other_end(self, row: Row) -> int | None:
        """The inode at the other end of a TCP or UDP connection on this host; 0 not accepted yet, None elsewhere."""
        if row.pair is None:
            return None
        kind, own, other = row.pair
        return self.by_pair.get((kind, other, own))


def read_tables(pid: int, namespace: str | None) -> NetTables:
    """The sockets of a process's network namespace. `namespace` is None when that is our own."""
    tables = NetTables()
    for name in INET_TABLES:
        for row in parse_inet(name, read_text(f"/proc/{pid}/net/{name}") or ""):
            _add_inet(tables, row)
    for name, parse in (("unix", parse_unix), ("netlink", parse_netlink), ("packet", parse_packet)):
        tables.rows.update({row.inode: row for row in parse(read_text(f"/proc/{pid}/net/{name}") or "")})
    tables.unix = unix_peers(namespace)
    return tables


def _add_inet(tables: NetTables, row: Row) -> None:
    if row.inode:
        tables.rows[row.inode] = row
    if row.pair is not None:
        tables.by_pair[row.pair] = row.inode
    elif row.state == "listen":
        tables.listeners.setdefault(row.own.rpartition(":")[2], []).append(row.inode)


def parse_inet(table: str, text: str) -> Iterator[Row]:
    """Parse /proc/net/{tcp,udp,raw,icmp}[6]."""
    family, kind = INET_TABLES[table]
    for line in text.split("\n")[1:]:
        columns = line.split()
        if len(columns) >= 10:
            yield _inet_row(family, kind, columns)


def _inet_row(family: str, kind: str, columns: list[str]) -> Row:
    own, other, code = columns[1], columns[2], columns[3]
    connected = code not in {"07", "0A"} and not other.endswith(":0000")
    state = TCP_STATES.get(code, code) if kind == "stream" else _DATAGRAM_STATES[connected]
    pair = (kind, own.removeprefix(V4_MAPPED), other.removeprefix(V4_MAPPED)) if connected else None
    return Row(int(columns[9]), family, kind, state, own, other if connected else "", pair)


def address(text: str) -> str:
    """'127.0.0.1:80' or '[::1]:80' from the kernel's '0100007F:0050'."""
    host, _, port = text.partition(":")
    raw = bytes.fromhex(host)
    # The kernel prints 32-bit words in host byte order, of an address in network byte order.
    words = [raw[at : at + 4] for at in range(0, len(raw), 4)]
    packed = b"".join(word[::-1] if sys.byteorder == "little" else word for word in words)
    if len(packed) == 4:
        return f"{socket.inet_ntop(socket.AF_INET, packed)}:{int(port, 16)}"
    return f"[{socket.inet_ntop(socket.AF_INET6, packed)}]:{int(port, 16)}"


def parse_unix(text: str) -> Iterator[Row]:
    """Parse /proc/net/unix. Abstract names begin with '@'; a name with a newline loses what follows it."""
    for line in text.split("\n")[1:]:
        columns = line.split(None, 7)
        if len(columns) < 7 or not columns[6].isdigit():
            continue
        path = columns[7] if len(columns) == 8 else ""
        listens = int(columns[3], 16) & UNIX_LISTENS
        state = "listen" if listens else _UNIX_STATES.get(columns[5], "unconnected")
        yield Row(int(columns[6]), "unix", UNIX_TYPES.get(columns[4], ""), state, path)


def parse_netlink(text: str) -> Iterator[Row]:
    """Parse /proc/net/netlink. `own` is 'protocol 0 port 1234'."""
    for line in text.split("\n")[1:]:
        columns = line.split()
        if len(columns) >= 10:
            yield Row(int(columns[-1]), "netlink", "raw", "unconnected", f"protocol {columns[1]} port {columns[2]}")


def parse_packet(text: str) -> Iterator[Row]:
    """Parse /proc/net/packet. `own` is 'protocol 0003 interface 2'."""
    for line in text.split("\n")[1:]:
        columns = line.split()
        if len(columns) >= 9:
            kind = "raw" if columns[2] == "3" else "dgram"
            local = f"protocol {columns[3]} interface {columns[4]}"
            yield Row(int(columns[-1]), "packet", kind, "unconnected", local)


PROTOCOLS = {
    "TCP": ("inet", "stream"),
    "TCPv6": ("inet6", "stream"),
    "MPTCP": ("inet", "stream"),
    "MPTCPv6": ("inet6", "stream"),
    "UDP": ("inet", "dgram"),
    "UDPv6": ("inet6", "dgram"),
    "UDP-Lite": ("inet", "dgram"),
    "UDPLITEv6": ("inet6", "dgram"),
    "PING": ("inet", "dgram"),
    "PINGv6": ("inet6", "dgram"),
    "RAW": ("inet", "raw"),
    "RAWv6": ("inet6", "raw"),
    "UNIX": ("unix", ""),
    "UNIX-STREAM": ("unix", "stream"),
    "NETLINK": ("netlink", "raw"),
    "PACKET": ("packet", ""),
    "AF_VSOCK": ("vsock", ""),
}
"""Names of struct proto in the kernel, which sockfs gives as the attribute system.sockprotoname."""


def row_from_protocol(inode: int, name: str) -> Row:
    """A socket that no table shows: never bound nor connected, or of a family without a table.

    Unix sockets always stand in the table of their namespace: one that does not is of a namespace we cannot read.
    """
    family, kind = PROTOCOLS.get(name, ("unknown", ""))
    return Row(inode, family, kind, "unknown" if family == "unix" else "unconnected", "")

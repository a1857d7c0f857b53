"""nftables tables over netlink: CRIU's network lock is found and removed without any nft program.

While it dumps, CRIU drops all packets of the tree's connections with a table `inet CRIU-<run id>`. It
removes the table itself unless it is killed, or told to end the tree. As long as the table is there
those connections are dead; deleting it heals them at once (seen with 4.2.1 and 4.3).

Message layouts: linux/netlink.h, linux/netfilter/nfnetlink.h, linux/netfilter/nf_tables.h.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
import time
from typing import TYPE_CHECKING

from gpuckpt.model.records import dataclass

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

NETLINK_NETFILTER = 12
_NFTABLES = 10
"""NFNL_SUBSYS_NFTABLES: the high byte of a message type, and the resource of a batch."""
_GET_TABLE, _DELETE_TABLE = _NFTABLES << 8 | 1, _NFTABLES << 8 | 2
_NEW_TABLE = _NFTABLES << 8 | 0
_BATCH_BEGIN, _BATCH_END = 0x10, 0x11
_ERROR, _DONE = 2, 3
_REQUEST, _ACK, _DUMP = 0x1, 0x4, 0x300
_TABLE_NAME = 1
_ATTRIBUTE_TYPE = 0x3FFF
"""Without the flags NLA_F_NESTED and NLA_F_NET_BYTEORDER."""
_HEADER = struct.Struct("=IHHII")
_GENERIC = struct.Struct(">BBH")
_ATTRIBUTE = struct.Struct("=HH")
_RECEIVE_BYTES = 1 << 16

INET = 1
"""NFPROTO_INET, the family of CRIU's tables."""
CUT_RUN_ID = 21
"""Characters of the run id in the table's name up to CRIU 4.2.1: its buffer has 32 bytes, 'inet CRIU-' included."""
TIMEOUT_SECONDS = 5.0
_MISSING = (errno.EPROTONOSUPPORT, errno.EAFNOSUPPORT, errno.EOPNOTSUPP)
"""Kernels without netfilter's netlink (the first two, from socket) or, to a batch, without nf_tables."""


@dataclass(frozen=True, slots=True)
class Table:
    """An nftables table of this network namespace."""

    family: int
    """NFPROTO_*: 1 inet, 2 ip, 10 ip6 …"""
    name: str


@dataclass(frozen=True, slots=True)
class Change:
    """One message of a batch."""

    kind: int
    """NFNL_SUBSYS_NFTABLES and one of NFT_MSG_*, see `kind_of`."""
    flags: int
    body: bytes


class NetfilterMissing(OSError):
    """This kernel has no nf_tables, so there are no tables at all."""


def list_tables() -> tuple[Table, ...]:
    """All tables of this network namespace.

    Raises NetfilterMissing where the kernel has no nf_tables, other OSErrors (without CAP_NET_ADMIN:
    PermissionError; no answer: TimeoutError).
    """
    with _connect() as link:
        link.send(_message(_GET_TABLE, _REQUEST | _DUMP, 1, _GENERIC.pack(0, 0, 0)))
        try:
            return tuple(_table(body) for kind, body in _answers(link) if kind == _NEW_TABLE)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            # To a question, unlike to a batch, a kernel without nf_tables answers "invalid".
            raise _named(errno.EOPNOTSUPP) from None


def delete_table(family: int, name: str) -> bool:
    """Delete one table with all that is in it; False when there is none of that name. Raises OSError."""
    try:
        change((Change(_DELETE_TABLE, 0, _GENERIC.pack(family, 0, 0) + text(_TABLE_NAME, name)),))
    except FileNotFoundError:
        return False
    return True


def change(changes: Sequence[Change]) -> None:
    """Make changes, all of them or none. Raises NetfilterMissing, other OSErrors."""
    batch, last = _GENERIC.pack(0, 0, _NFTABLES), len(changes) + 1
    # They are accepted in batches only: begin, the changes, end.
    request = [_message(_BATCH_BEGIN, _REQUEST, 1, batch)]
    for number, one in enumerate(changes, 2):
        flags = _REQUEST | one.flags | (_ACK if number == last else 0)
        request.append(_message(one.kind, flags, number, one.body))
    request.append(_message(_BATCH_END, _REQUEST, last + 1, batch))
    with _connect() as link:
        link.send(b"".join(request))
        for _ in _answers(link, acknowledged=last):
            pass


def delete_criu_tables(run_id: str) -> tuple[str, ...]:
    """Delete the network lock of the CRIU run with this id and return the names of the deleted tables.

    Only `inet CRIU-<run id>`, whole or cut as CRIU up to 4.2.1 cuts it, is touched; nothing else, however
    similar. Empty where there is none or the kernel has no nf_tables. May be repeated. Raises OSError.
    """
    if len(run_id) < CUT_RUN_ID:
        return ()  # no run id: images of CRIU before 4.1 have none, and a short one could hit another's table
    wanted = {f"CRIU-{run_id}", f"CRIU-{run_id[:CUT_RUN_ID]}"}
    try:
        found = [table for table in list_tables() if table.family == INET and table.name in wanted]
    except NetfilterMissing:
        return ()
    return tuple(table.name for table in found if delete_table(table.family, table.name))


def _connect() -> socket.socket:
    try:
        link = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, NETLINK_NETFILTER)
    except OSError as error:
        raise _named(error.errno or 0) from None
    link.settimeout(TIMEOUT_SECONDS)
    link.bind((0, 0))
    return link


def _named(number: int) -> OSError:
    if number in _MISSING:
        return NetfilterMissing(number, "this kernel has no nf_tables")
    return OSError(number, f"nf_tables: {os.strerror(number)}")


def _message(kind: int, flags: int, sequence: int, payload: bytes) -> bytes:
    return _HEADER.pack(_HEADER.size + len(payload), kind, flags, sequence, 0) + payload


def kind_of(message: int) -> int:
    """The type of a netlink message that is NFT_MSG_`message`."""
    return _NFTABLES << 8 | message


def text(kind: int, value: str) -> bytes:
    """An attribute that is a string."""
    return attribute(kind, os.fsencode(value) + b"\0")


def attribute(kind: int, value: bytes) -> bytes:
    """An attribute, padded."""
    return _ATTRIBUTE.pack(_ATTRIBUTE.size + len(value), kind) + value + bytes(-len(value) % 4)


def _answers(link: socket.socket, acknowledged: int | None = None) -> Iterator[tuple[int, bytes]]:
    """The messages of an answer, to the end of the list or the acknowledgement with this sequence number."""
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while time.monotonic() < deadline:
        for kind, sequence, body in _split(link.recv(_RECEIVE_BYTES)):
            if kind == _DONE:
                return
            if kind == _ERROR:
                number = -struct.unpack_from("=i", body)[0]
                if number:
                    raise _named(number)
                if sequence == acknowledged:
                    return
            yield kind, body
    raise TimeoutError(errno.ETIMEDOUT, "nf_tables: the kernel gave no complete answer")


def _split(datagram: bytes) -> Iterator[tuple[int, int, bytes]]:
    position = 0
    while position + _HEADER.size <= len(datagram):
        size, kind, _, sequence, _ = _HEADER.unpack_from(datagram, position)
        if size < _HEADER.size:
            return
        yield kind, sequence, datagram[position + _HEADER.size : position + size]
        position += (size + 3) & ~3


def _table(body: bytes) -> Table:
    position, name = _GENERIC.size, ""
    while position + _ATTRIBUTE.size <= len(body):
        size, kind = _ATTRIBUTE.unpack_from(body, position)
        if size < _ATTRIBUTE.size:
            break
        if kind & _ATTRIBUTE_TYPE == _TABLE_NAME:
            name = os.fsdecode(body[position + _ATTRIBUTE.size : position + size].rstrip(b"\0"))
        position += (size + 3) & ~3
    return Table(body[0], name)

"""A table that drops the packets of some TCP connections, and of no others: made over netlink, without any nft program.

While a connection's address is here and its socket is not, this host would answer what the other end sends with a
reset. `netfilter.delete_table(INET, name)` takes it away. As `nft` would show it:

    table inet NAME {
        chain input { type filter hook input priority raw; ip saddr . ip daddr … tcp sport . tcp dport … drop }
        chain output { type filter hook output priority raw; … the other way round … drop }
    }

Message layouts: linux/netfilter/nf_tables.h; what a rule is made of: net/netfilter/nft_{meta,cmp,payload,immediate}.c.
"""

from __future__ import annotations

import contextlib
import socket
import struct
from typing import TYPE_CHECKING

from gpuckpt.model.records import dataclass
from gpuckpt.system.netfilter import INET, Change, attribute, change, delete_table, kind_of, text

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_NEW_TABLE, _NEW_CHAIN, _NEW_RULE = (kind_of(message) for message in (0, 3, 6))
_CREATE, _EXCLUSIVE, _APPEND = 0x400, 0x200, 0x800
_NESTED = 0x8000

_HOOKS = {"input": 1, "output": 3}
"""NF_INET_LOCAL_IN and NF_INET_LOCAL_OUT."""
_BEFORE_OTHERS = -300
"""NF_IP_PRI_RAW: a firewall of this host's may answer what it does not know with a reset, too."""
_NFPROTO, _L4PROTO = 15, 16
"""NFT_META_*."""
_NETWORK, _TRANSPORT = 1, 2
"""NFT_PAYLOAD_*_HEADER."""
_REGISTER = 1
"""NFT_REG_1, of 16 bytes; 0 takes a verdict."""
_DROP = 0
_ADDRESSES = {4: (2, 12), 16: (10, 8)}
"""Bytes of an address -> NFPROTO_*, and where the source's begins in the header. The destination's follows it."""
_RULES_AT_ONCE = 100
"""A batch must fit into the socket's buffer (net.core.wmem_default, 208 KiB); a rule takes up to half a KiB."""


@dataclass(frozen=True, slots=True)
class Connection:
    """A TCP connection of this host. Addresses as text, IPv4 ones not mapped to IPv6."""

    local: str
    local_port: int
    remote: str
    remote_port: int


def hold_back(name: str, connections: Sequence[Connection]) -> None:
    """Make the table. Raises OSError (NetfilterMissing), ValueError (no address, no port): then there is none."""
    rules = [rule for one in connections for rule in _rules(name, one)]
    table = Change(_NEW_TABLE, _CREATE | _EXCLUSIVE, _head() + text(1, name))
    change([table, *(_chain(name, chain, hook) for chain, hook in _HOOKS.items())])
    try:
        for begin in range(0, len(rules), _RULES_AT_ONCE):
            change(rules[begin : begin + _RULES_AT_ONCE])
    except BaseException:
        with contextlib.suppress(OSError):
            delete_table(INET, name)
        raise


def _head() -> bytes:
    """The struct nfgenmsg."""
    return struct.pack(">BBH", INET, 0, 0)


def _number(kind: int, value: int) -> bytes:
    return attribute(kind, struct.pack(">i", value))


def _nest(kind: int, *attributes: bytes) -> bytes:
    return attribute(kind | _NESTED, b"".join(attributes))


def _chain(table: str, name: str, hook: int) -> Change:
    where = _nest(4, _number(1, hook), _number(2, _BEFORE_OTHERS))
    return Change(_NEW_CHAIN, _CREATE, _head() + text(1, table) + text(3, name) + where + text(7, "filter"))


def _rules(table: str, connection: Connection) -> Iterator[Change]:
    here = (_packed(connection.local), _port(connection.local_port))
    there = (_packed(connection.remote), _port(connection.remote_port))
    yield _rule(table, "input", there, here)
    yield _rule(table, "output", here, there)


def _packed(address: str) -> bytes:
    try:
        return socket.inet_pton(socket.AF_INET6 if ":" in address else socket.AF_INET, address)
    except OSError:
        raise ValueError(f"{address!r} is no address") from None


def _port(number: int) -> bytes:
    if not 0 <= number < 1 << 16:
        raise ValueError(f"{number} is no port")
    return struct.pack(">H", number)


def _rule(table: str, chain: str, source: tuple[bytes, bytes], target: tuple[bytes, bytes]) -> Change:
    """Drop TCP packets from one (address, port) to another one. Raises ValueError for addresses of two kinds."""
    size = len(source[0])
    if len(target[0]) != size:
        raise ValueError("an IPv4 and an IPv6 address make no connection")
    protocol, begin = _ADDRESSES[size]
    expressions = (
        *_equal(_meta(_NFPROTO), bytes([protocol])),
        *_equal(_meta(_L4PROTO), bytes([socket.IPPROTO_TCP])),
        *_equal(_payload(_NETWORK, begin, size), source[0]),
        *_equal(_payload(_NETWORK, begin + size, size), target[0]),
        *_equal(_payload(_TRANSPORT, 0, 4), source[1] + target[1]),
        _expression("immediate", _number(1, 0), _nest(2, _nest(2, _number(1, _DROP)))),
    )
    body = _head() + text(1, table) + text(2, chain) + _nest(4, *expressions)
    return Change(_NEW_RULE, _CREATE | _APPEND, body)


def _expression(name: str, *attributes: bytes) -> bytes:
    return _nest(1, text(1, name), _nest(2, *attributes))


def _meta(key: int) -> bytes:
    return _expression("meta", _number(1, _REGISTER), _number(2, key))


def _payload(base: int, offset: int, size: int) -> bytes:
    return _expression("payload", _number(1, _REGISTER), _number(2, base), _number(3, offset), _number(4, size))


def _equal(load: bytes, value: bytes) -> tuple[bytes, bytes]:
    """What `load` puts into the register is this value, or the rule does not match."""
    return load, _expression("cmp", _number(1, _REGISTER), _number(2, 0), _nest(3, attribute(1, value)))

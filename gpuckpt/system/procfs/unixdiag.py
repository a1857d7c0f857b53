"""Who is connected to whom among unix sockets: the kernel's socket diagnosis, asked over netlink.

/proc/net/unix does not say it. Layouts from include/uapi/linux/{netlink,unix_diag}.h.
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

NETLINK_SOCK_DIAG = 4
SOCK_DIAG_BY_FAMILY = 20
NLM_F_REQUEST_DUMP = 0x301
NLMSG_ERROR, NLMSG_DONE = 2, 3
NLM_F_DUMP_INTR = 0x10
UDIAG_SHOW_PEER, UDIAG_SHOW_ICONS = 4, 8
UNIX_DIAG_PEER, UNIX_DIAG_ICONS = 2, 3
CLONE_NEWNET = 0x40000000
TRIES = 5
SECONDS = 5.0

_HEADER = struct.Struct("=IHHII")
_MESSAGE = struct.Struct("=BBBxIII")
_ATTRIBUTE = struct.Struct("=HH")


@dataclass(slots=True)
class UnixPeers:
    """The connections among the unix sockets of one network namespace, by inode."""

    peers: dict[int, int] = field(default_factory=dict)
    """Connected socket -> its peer; 0 when the peer was closed or not accepted yet."""
    waiting: dict[int, int] = field(default_factory=dict)
    """Connected socket that nobody has accepted yet -> the listening socket in whose queue it is."""


class _Interrupted(Exception):
    """The kernel's table changed during the dump: ask again."""


def unix_peers(namespace: str | None) -> UnixPeers | None:
    """Ask in this network namespace (a path like /proc/PID/ns/net; None for our own); None when it cannot be asked."""
    try:
        return _ask_again() if namespace is None else _in_namespace(namespace, _ask_again)
    except OSError:
        return None


def _in_namespace(namespace: str, ask: Callable[[], UnixPeers]) -> UnixPeers:
    """Run `ask` in a thread of its own that enters the namespace and ends: setns changes the calling thread alone."""
    result: list[UnixPeers] = []
    failure: list[OSError] = []

    def enter_and_ask() -> None:
        try:
            _enter(namespace)
            result.append(ask())
        except OSError as error:
            failure.append(error)

    thread = threading.Thread(target=enter_and_ask)
    thread.start()
    thread.join()
    if failure:
        raise failure[0]
    return result[0]


def _enter(namespace: str) -> None:
    # os.setns is there from Python 3.12 on only.
    libc = ctypes.CDLL(None, use_errno=True)
    handle = os.open(namespace, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if libc.setns(handle, CLONE_NEWNET) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), namespace)
    finally:
        os.close(handle)


def _ask_again() -> UnixPeers:
    for _ in range(TRIES - 1):
        try:
            return _ask(strict=True)
        except _Interrupted:
            continue
    return _ask(strict=False)


def _ask(*, strict: bool) -> UnixPeers:
    found = UnixPeers()
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, NETLINK_SOCK_DIAG) as diag:
        diag.settimeout(SECONDS)
        diag.sendto(_request(), (0, 0))
        while True:
            for kind, flags, payload in split_messages(diag.recv(1 << 17)):
                if strict and flags & NLM_F_DUMP_INTR:
                    raise _Interrupted
                if kind == NLMSG_DONE:
                    return found
                if kind == NLMSG_ERROR:
                    number = -struct.unpack_from("=i", payload)[0]
                    raise OSError(number, os.strerror(number))
                note(payload, found)


def _request() -> bytes:
    show = UDIAG_SHOW_PEER | UDIAG_SHOW_ICONS
    every_state, any_cookie = 0xFFFFFFFF, 0xFFFFFFFF
    body = struct.pack("=BBHIIIII", socket.AF_UNIX, 0, 0, every_state, 0, show, any_cookie, any_cookie)
    return _HEADER.pack(_HEADER.size + len(body), SOCK_DIAG_BY_FAMILY, NLM_F_REQUEST_DUMP, 1, 0) + body


def split_messages(raw: bytes) -> Iterator[tuple[int, int, bytes]]:
    """(type, flags, payload) of each netlink message in one datagram."""
    at = 0
    while at + _HEADER.size <= len(raw):
        size, kind, flags, _, _ = _HEADER.unpack_from(raw, at)
        if size < _HEADER.size:
            return
        yield kind, flags, raw[at + _HEADER.size : at + size]
        at += (size + 3) & ~3


def note(payload: bytes, found: UnixPeers) -> None:
    """Take one unix_diag_msg and its attributes into account."""
    _, _, _, inode, _, _ = _MESSAGE.unpack_from(payload)
    at = _MESSAGE.size
    while at + _ATTRIBUTE.size <= len(payload):
        size, kind = _ATTRIBUTE.unpack_from(payload, at)
        if size < _ATTRIBUTE.size:
            return
        data = payload[at + _ATTRIBUTE.size : at + size]
        inodes = struct.unpack_from(f"={len(data) // 4}I", data)
        if kind == UNIX_DIAG_PEER:
            found.peers[inode] = inodes[0]
        elif kind == UNIX_DIAG_ICONS:
            found.waiting.update(dict.fromkeys(filter(None, inodes), inode))
        at += (size + 3) & ~3

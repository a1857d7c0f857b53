"""The far end of `criu dump --stream`: its protocol, and pipes.

CRIU connects to <images-dir>/streamer-capture.sock and sends, for every image file, a request (u32
length, then the protobuf message img_streamer_request_entry, whose field 1 is the name) and one byte with
the read end of a pipe (SCM_RIGHTS). The end of the pipe is the end of the file. Sources:
criu/img-streamer.c and images/img-streamer.proto of CRIU 3.15 and later.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import os
import re
import select
import socket
import struct
import sys
import threading
from typing import TYPE_CHECKING

from gpuckpt.images import wire
from gpuckpt.model.errors import ImageCorrupt
from gpuckpt.system.hostsettings import F_SETPIPE_SZ

if TYPE_CHECKING:
    from pathlib import Path

SOCKET = "streamer-capture.sock"
MAX_SOCKET_PATH = 107
"""sun_path without its final NUL (unix(7)); CRIU cuts a longer path silently."""

F_GETPIPE_SZ = F_SETPIPE_SZ + 1

SPLICE_NONBLOCK = 0x02
MAX_REQUEST_BYTES = 4096
PEER_SECONDS = 30.0
"""A request that was begun is complete within this time."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*\.img")
_LENGTH = struct.Struct("<I")


class ProtocolError(ImageCorrupt):
    """CRIU said something that is not the protocol."""


def listen(directory: Path) -> socket.socket:
    """A listening socket where CRIU will look for it. Raises OSError, also for a path too long for a socket."""
    path = directory / SOCKET
    if len(os.fsencode(path)) > MAX_SOCKET_PATH:
        raise OSError(f"{path} is too long for a socket")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(str(path))
        listener.listen(1)
    except BaseException:
        listener.close()
        raise
    return listener


def read_request(peer: socket.socket) -> str | None:
    """The name of the next image file, or None at the end. Raises ProtocolError, OSError."""
    head = _receive(peer, _LENGTH.size)
    if not head:
        return None
    (length,) = _LENGTH.unpack(head)
    if length > MAX_REQUEST_BYTES:
        raise ProtocolError(f"CRIU's stream: a request of {length} bytes")
    try:
        name = wire.text_of(wire.decode(_receive(peer, length)), 1)
    except wire.Malformed as error:
        raise ProtocolError(f"CRIU's stream: {error}") from None
    if not _NAME.fullmatch(name):
        raise ProtocolError(f"CRIU's stream: {name[:100]!r} is no name of an image file")
    return name


def _receive(peer: socket.socket, count: int) -> bytes:
    """Exactly `count` bytes, or nothing at the end."""
    parts = b""
    while len(parts) < count:
        part = peer.recv(count - len(parts))
        if not part:
            if parts:
                raise ProtocolError("CRIU's stream ends within a request")
            return b""
        parts += part
    return parts


def receive_pipe(peer: socket.socket) -> int:
    """The read end that follows a request. The caller closes it. Raises ProtocolError, OSError."""
    room = socket.CMSG_SPACE(array.array("i").itemsize)
    _, ancillary, _, _ = peer.recvmsg(1, room, socket.MSG_CMSG_CLOEXEC)
    found = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            found.frombytes(data[: len(data) - len(data) % found.itemsize])
    if len(found) != 1:
        for descriptor in found:
            os.close(descriptor)
        raise ProtocolError(f"CRIU's stream: {len(found)} pipes instead of one")
    return found[0]


def grow_pipe(descriptor: int, wanted: int) -> int:
    """Make a pipe as large as allowed, up to `wanted` bytes; returns what it holds now.

    Above fs.pipe-max-size the kernel asks for CAP_SYS_RESOURCE (pipe(7)), which root in a container may lack.
    """
    size = wanted
    while size >= 1 << 16:
        with contextlib.suppress(OSError):
            return int(fcntl.fcntl(descriptor, F_SETPIPE_SZ, size))
        size >>= 1
    return int(fcntl.fcntl(descriptor, F_GETPIPE_SZ))


class Stop:
    """A flag that every poll can wait for."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe()
        self._raised = False

    def fileno(self) -> int:
        """Readable (hung up) once it is raised."""
        return self._read

    def raise_(self) -> None:
        """Raise it; more than once is no harm."""
        if not self._raised:
            self._raised = True
            os.close(self._write)

    def is_raised(self) -> bool:
        """Whether it was raised."""
        return self._raised

    def close(self) -> None:
        """Give its descriptors back, when nobody waits any more."""
        self.raise_()
        os.close(self._read)


class Doors:
    """Descriptors through which CRIU hands us things, shut all together when the capture fails.

    While one is open, also one that still lies in a socket, CRIU can be waiting in a write for ever; and the
    thread that should close it can be waiting for a disk. So they are shut from outside: /dev/null takes the
    place of each, and the numbers stay taken until their own threads close them.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: set[int] = set()
        self._shut = False
        self._null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)

    def add(self, descriptor: int) -> None:
        """Shut this one too, when it comes to that."""
        with self._lock:
            self._open.add(descriptor)
            if self._shut:
                os.dup2(self._null, descriptor, inheritable=False)

    def close(self, door: int | socket.socket) -> None:
        """Close one in the ordinary way."""
        with self._lock:
            if isinstance(door, int):
                self._open.discard(door)
                os.close(door)
            else:
                self._open.discard(door.fileno())
                door.close()

    def shut(self) -> None:
        """Shut all that are open, and all that will be added."""
        with self._lock:
            if not self._shut:
                self._shut = True
                for descriptor in self._open:
                    os.dup2(self._null, descriptor, inheritable=False)

    def give_back(self) -> None:
        """No thread is left that uses any."""
        os.close(self._null)


class Poller:
    """Waits until one descriptor is ready, or all shall stop."""

    def __init__(self, descriptor: int, event: int, stop: Stop) -> None:
        self._descriptor = descriptor
        self._stop = stop
        self._poll = select.poll()
        self._poll.register(descriptor, event)
        self._poll.register(stop.fileno(), select.POLLIN)

    def wait(self, milliseconds: int | None = None) -> int:
        """The events of the descriptor: 0 when `milliseconds` passed or all shall stop."""
        ready = dict(self._poll.poll(milliseconds))
        return 0 if self._stop.is_raised() else ready.get(self._descriptor, 0)


def splice(source: int, target: int, count: int) -> int:
    """Move bytes from one pipe to another without copying; 0 at the end. Raises BlockingIOError rather than wait."""
    if sys.platform != "linux":
        raise OSError("splice(2) is Linux's")
    return os.splice(source, target, count, flags=SPLICE_NONBLOCK)

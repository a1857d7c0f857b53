"""SFTP over an ssh of OpenSSH's, with many requests under way: paramiko's client speaks it, ssh carries it.

paramiko's own pipelined files lose the errors of writes that are confirmed late (sftp_file.py, _write), so requests
are posted and each answer is looked at here. What is written and read in bulk passes it by: it would copy each byte
five times. Paths are bytes. A failed request is an OSError; OpenSSH's server has no number for a full disk, it says
"Failure".
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import struct
from typing import TYPE_CHECKING, Any

import paramiko  # noqa: TID251 - this is its home
from paramiko import sftp as wire  # noqa: TID251

from gpuckpt.model.records import dataclass
from gpuckpt.system.extents import Extent
from gpuckpt.system.links import LinkLost

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from gpuckpt.system.ssh import Call

SMALL_BYTES = 32 << 10
"""What every server takes in one request."""

LARGEST_BYTES = 255 << 10
MOST_NAMES = 10_000
MOST_LEVELS = 16
UNDER_WAY = 64
LARGEST_PACKET = 1 << 24
HEAD, ANSWERED = struct.Struct(">IB"), struct.Struct(">IBI")
"""Of a packet: its length, its kind; and of every answer the number of its request."""
COUNT = struct.Struct(">I")
READ, WRITE, CREATE, TRUNCATE, EXCLUSIVE = 1, 2, 8, 16, 32
"""SSH_FXF_ flags."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A name in a directory, or what an lstat sees."""

    name: bytes
    mode: int
    size: int
    uid: int
    modified: int

    @property
    def is_file(self) -> bool:
        """A regular file."""
        return stat.S_ISREG(self.mode)

    @property
    def is_directory(self) -> bool:
        """A directory, no link."""
        return stat.S_ISDIR(self.mode)

    @property
    def is_link(self) -> bool:
        """A symbolic link."""
        return stat.S_ISLNK(self.mode)


class _Socket:
    """A call's stream as paramiko wants to see it."""

    def __init__(self, call: Call) -> None:
        self._call = call

    def send(self, content: bytes) -> int:
        self._call.link.send(content)
        return len(content)

    def close(self) -> None:
        self._call.close()


class Sftp(paramiko.SFTPClient):  # type: ignore[misc]  # paramiko has no types
    """One SFTP session; for one thread at a time."""

    request_number: int
    """Of the next request; paramiko counts."""

    def __init__(self, call: Call) -> None:
        """Greet the server. Raises LinkLost."""
        self._answers: dict[int, tuple[int, Any]] = {}
        self._asked: set[int] = set()
        """Requests whose answer has not come yet."""
        self._into: dict[int, memoryview] = {}
        """Where the content of an answer shall go."""
        self._call = call
        self.beat: Callable[[], None] = lambda: None
        """To be called now and then while the session is used."""
        with _plain_errors():
            super().__init__(_Socket(call))
        self.request_bytes = self._limit()

    def _read_packet(self) -> tuple[int, bytes]:
        """A packet, its kind and content, where paramiko wants one: at the greeting."""
        size, kind = HEAD.unpack(self._exactly(HEAD.size))
        return kind, self._exactly(_bounded(size - 1))

    def _exactly(self, count: int) -> bytes:
        content = bytearray(count)
        self._call.link.receive_into(memoryview(content))
        return bytes(content)

    def _log(self, *_: Any) -> None:
        """Paramiko's log would ask the channel, which is none of its own, for its name."""

    def cut(self) -> None:
        """End it, from any thread."""
        self._call.close()

    def post(self, kind: int, *arguments: Any) -> int:
        """Send a request; returns its number for `answer`. Raises LinkLost."""
        with _plain_errors():
            self._asked.add(self.request_number)
            return int(self._async_request(type(None), kind, *arguments))

    def answer(self, number: int) -> tuple[int, Any]:
        """The answer to a request: its kind and content. Raises OSError (refused), EOFError, LinkLost."""
        with _plain_errors():
            while number not in self._answers:
                self._take_answer()
            kind, message = self._answers.pop(number)
            if kind == wire.CMD_STATUS:
                self._convert_status(message)
        return kind, message

    def _take_answer(self) -> None:
        size, kind, number = ANSWERED.unpack(self._exactly(ANSWERED.size))
        if number not in self._asked:
            raise LinkLost("the server answers what it was not asked")
        self._asked.discard(number)
        rest, into = _bounded(size - 5), self._into.pop(number, None)
        if into is None or kind != wire.CMD_DATA:
            self._answers[number] = (kind, paramiko.Message(self._exactly(rest)))
            return
        (count,) = COUNT.unpack(self._exactly(COUNT.size))
        if count > len(into) or count + COUNT.size != rest:
            raise LinkLost("the server sends more than it was asked for")
        self._call.link.receive_into(into[:count])
        self._answers[number] = (kind, count)

    def ask(self, kind: int, *arguments: Any) -> tuple[int, Any]:
        """A request and its answer."""
        return self.answer(self.post(kind, *arguments))

    def _limit(self) -> int:
        """The most bytes of a read or a write, as OpenSSH's server from 8.5 on says it."""
        try:
            kind, message = self.ask(wire.CMD_EXTENDED, b"limits@openssh.com")
        except (OSError, EOFError):
            return SMALL_BYTES
        if kind != wire.CMD_EXTENDED_REPLY:
            return SMALL_BYTES
        _packet, most_read, most_write = (message.get_int64() for _ in range(3))
        return int(max(SMALL_BYTES, min(most_read, most_write, LARGEST_BYTES)))

    def real_path(self, path: bytes) -> bytes:
        """The absolute path, links resolved."""
        _, message = self.ask(wire.CMD_REALPATH, path)
        message.get_int()
        return bytes(message.get_string())

    def read_link(self, path: bytes) -> bytes:
        """What a link leads to. Raises OSError."""
        _, message = self.ask(wire.CMD_READLINK, path)
        message.get_int()
        return bytes(message.get_string())

    def look(self, path: bytes, *, follow: bool = False) -> Entry | None:
        """What stands there; None where nothing does."""
        try:
            _, message = self.ask(wire.CMD_STAT if follow else wire.CMD_LSTAT, path)
        except FileNotFoundError:
            return None
        return _entry(os.path.basename(path), message)  # noqa: PTH119 - bytes

    def exist(self, paths: Sequence[bytes]) -> list[bool]:
        """Whether something stands at each place, many asked for at once; what may not be seen does not."""
        found: list[bool] = []
        for at in range(0, len(paths), UNDER_WAY):
            numbers = [self.post(wire.CMD_LSTAT, path) for path in paths[at : at + UNDER_WAY]]
            found += [self._is_there(number) for number in numbers]
        return found

    def _is_there(self, number: int) -> bool:
        try:
            self.answer(number)
        except (OSError, EOFError):
            return False
        return True

    def names(self, path: bytes) -> list[Entry]:
        """What is in a directory, at most MOST_NAMES."""
        handle = self.open_directory(path)
        found: list[Entry] = []
        try:
            with contextlib.suppress(EOFError):
                while len(found) < MOST_NAMES and (some := list(self._some_names(handle))):
                    found += some
        finally:
            self.done(handle)
        return [entry for entry in found if entry.name not in (b".", b"..") and b"/" not in entry.name]

    def _some_names(self, handle: bytes) -> Iterator[Entry]:
        _, message = self.ask(wire.CMD_READDIR, handle)
        for _ in range(min(message.get_int(), MOST_NAMES)):
            name = bytes(message.get_string())
            message.get_string()
            yield _entry(name, message)

    def open_directory(self, path: bytes) -> bytes:
        """A handle of a directory."""
        return bytes(self.ask(wire.CMD_OPENDIR, path)[1].get_binary())

    def open_file(self, path: bytes, flags: int) -> bytes:
        """A handle of a file; new ones are 0600."""
        attributes = paramiko.SFTPAttributes()
        attributes.st_mode = 0o600
        attributes._flags = attributes.FLAG_PERMISSIONS  # noqa: SLF001 - otherwise only set from a stat
        return bytes(self.ask(wire.CMD_OPEN, path, flags, attributes)[1].get_binary())

    def done(self, handle: bytes) -> None:
        """Close a handle."""
        self.ask(wire.CMD_CLOSE, handle)

    def make_directory(self, path: bytes) -> None:
        """A directory of mode 0700."""
        attributes = paramiko.SFTPAttributes()
        attributes.st_mode = 0o700
        attributes._flags = attributes.FLAG_PERMISSIONS  # noqa: SLF001
        self.ask(wire.CMD_MKDIR, path, attributes)

    def remove_file(self, path: bytes) -> None:
        """Remove a file, where it is."""
        with contextlib.suppress(FileNotFoundError):
            self.ask(wire.CMD_REMOVE, path)

    def remove_tree(self, path: bytes, deepest: int = MOST_LEVELS) -> None:
        """Remove a directory and what is in it, following no link. Raises OSError, also where it is too deep."""
        if deepest == 0:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
        for entry in self.names(path):
            place = path + b"/" + entry.name
            if entry.is_directory:
                self.remove_tree(place, deepest - 1)
            else:
                self.remove_file(place)
        self.ask(wire.CMD_RMDIR, path)

    def rename_to_new(self, old: bytes, new: bytes) -> None:
        """Rename; OpenSSH's server refuses where something stands at `new`."""
        self.ask(wire.CMD_RENAME, old, new)

    def hard_link(self, old: bytes, new: bytes) -> None:
        """Link a file. Raises OSError where the server cannot."""
        self.ask(wire.CMD_EXTENDED, b"hardlink@openssh.com", old, new)

    def sync(self, handle: bytes) -> None:
        """Have a file reach the disk. Raises OSError where the server cannot."""
        self.ask(wire.CMD_EXTENDED, b"fsync@openssh.com", handle)

    def free_bytes(self, path: bytes) -> int | None:
        """What is free for this user; None where the server does not say."""
        try:
            kind, message = self.ask(wire.CMD_EXTENDED, b"statvfs@openssh.com", path)
        except (OSError, EOFError):
            return None
        if kind != wire.CMD_EXTENDED_REPLY:
            return None
        _block, fragment, _blocks, _free, available = (message.get_int64() for _ in range(5))
        return int(fragment * available)

    def post_write(self, handle: bytes, offset: int, content: memoryview | Extent) -> list[int]:
        """Write, in as many requests as it takes; returns their numbers. Raises LinkLost."""
        size = self.request_bytes
        return [self._post_write(handle, offset + at, content[at : at + size]) for at in range(0, len(content), size)]

    def _post_write(self, handle: bytes, offset: int, content: memoryview | Extent) -> int:
        number = self.request_number
        self.request_number += 1
        body = len(handle) + struct.calcsize(">IIQI") + len(content)
        head = ANSWERED.pack(body + 1, wire.CMD_WRITE, number) + COUNT.pack(len(handle)) + handle
        self._asked.add(number)
        self._call.link.send(head + struct.pack(">QI", offset, len(content)), content)
        return number

    def post_read(self, handle: bytes, offset: int, into: memoryview) -> int:
        """Ask for what fills `into`, at most `request_bytes`; returns the request's number."""
        number = self.post(wire.CMD_READ, handle, wire.int64(offset), len(into))
        self._into[number] = into
        return number

    def take_read(self, number: int) -> int:
        """How many bytes have come, or fewer than asked for; 0 at the end of the file. Raises LinkLost for more."""
        try:
            kind, count = self.answer(number)
        except EOFError:
            return 0
        if kind != wire.CMD_DATA:
            raise LinkLost("the server answers something else than it was asked")
        return int(count)

    def read_small(self, path: bytes, most: int) -> bytes:
        """A small file, at most `most` bytes and one more. Raises OSError."""
        handle = self.open_file(path, READ)
        content, chunk = bytearray(), memoryview(bytearray(self.request_bytes))
        try:
            while len(content) <= most:
                count = self.take_read(self.post_read(handle, len(content), chunk))
                if not count:
                    break
                content += chunk[:count]
        finally:
            self.done(handle)
        return bytes(content)

    def write_small(self, path: bytes, content: bytes, *, new: bool = False, sync: bool = False) -> None:
        """Write a small file whole. Raises OSError, also where it exists and should not."""
        handle = self.open_file(path, WRITE | CREATE | (EXCLUSIVE if new else TRUNCATE))
        try:
            for number in self.post_write(handle, 0, memoryview(content)):
                self.answer(number)
            if sync:
                with contextlib.suppress(OSError):
                    self.sync(handle)
        finally:
            self.done(handle)


def _bounded(size: int) -> int:
    """The length of what is left of a packet. Raises LinkLost for what cannot be one."""
    if not 0 <= size < LARGEST_PACKET:
        raise LinkLost("the server sends what is no packet")
    return size


@contextlib.contextmanager
def _plain_errors() -> Iterator[None]:
    """What paramiko makes of a broken stream, as what it is."""
    try:
        yield
    except (paramiko.SSHException, wire.SFTPError) as error:
        raise LinkLost(str(error)) from None


def _entry(name: bytes, message: Any) -> Entry:
    seen = paramiko.SFTPAttributes._from_msg(message)  # noqa: SLF001 - the only way to read one
    return Entry(name, seen.st_mode or 0, seen.st_size or 0, seen.st_uid or 0, int(seen.st_mtime or 0))

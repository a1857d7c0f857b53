"""An SFTP server that lies. It speaks the real protocol (draft-ietf-secsh-filexfer-02), and not always the truth."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from types import SimpleNamespace

import pytest

from gpuckpt.system.links import LinkLost, SocketLink
from gpuckpt.system.sftp import MOST_NAMES, Sftp

STATUS, HANDLE, DATA, NAME, ATTRS = 101, 102, 103, 104, 105
OPENDIR, READDIR, CLOSE, EXTENDED, READ, RMDIR, REMOVE, OPEN = 11, 12, 4, 200, 5, 15, 13, 3


def text(content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + content


def name(content: bytes, mode: int = 0o100600) -> bytes:
    return text(content) + text(b"") + struct.pack(">II", 4, mode)


class Server:
    """Answers each kind of request with what it is told to."""

    def __init__(self, answers) -> None:
        self._answers = {EXTENDED: (STATUS, struct.pack(">I", 8) + text(b"no") + text(b"")), OPENDIR: (HANDLE, text(b"h")),
                         OPEN: (HANDLE, text(b"h")), CLOSE: (STATUS, struct.pack(">I", 0)), **answers}  # fmt: skip
        ours, self._socket = socket.socketpair()
        link = SocketLink(ours, 20)
        self.call = SimpleNamespace(link=link, close=link.close)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _exactly(self, count: int) -> bytes:
        content = self._socket.recv(count, socket.MSG_WAITALL)
        if len(content) < count:
            raise OSError
        return content

    def _run(self) -> None:
        with contextlib.suppress(OSError), self._socket:
            self._exactly(struct.unpack(">I", self._exactly(4))[0])
            self._socket.sendall(struct.pack(">IBI", 5, 2, 3))
            while True:
                request = self._exactly(struct.unpack(">I", self._exactly(4))[0])
                kind, body = self._answers[request[0]]
                if callable(body):
                    body = body(request)
                number = request[1:5] if kind < 1000 else b"\xff\xff\xff\xff"
                self._socket.sendall(struct.pack(">IB", 5 + len(body), kind % 1000) + number + body)

    def end(self) -> None:
        self.call.close()
        self._thread.join()


@pytest.fixture
def session():
    servers = []

    def make(answers) -> Sftp:
        servers.append(Server(answers))
        return Sftp(servers[-1].call)

    yield make
    for server in servers:
        server.end()


def listing(*entries: bytes):
    return (NAME, struct.pack(">I", len(entries)) + b"".join(entries))


def test_names_that_lead_elsewhere_are_not_taken(session):
    once = iter([listing(name(b".."), name(b"."), name(b"../x"), name(b"/etc/passwd"), name(b"good"))[1]])
    sftp = session({READDIR: (NAME, lambda _request: next(once, struct.pack(">I", 0)))})
    assert [entry.name for entry in sftp.names(b"/x")] == [b"good"]


def test_an_endless_directory_ends(session):
    many = listing(*[name(b"%d" % number) for number in range(500)])
    assert MOST_NAMES <= len(session({READDIR: many}).names(b"/x")) < MOST_NAMES + 500


def test_a_directory_without_names_and_without_an_end_ends(session):
    assert session({READDIR: listing()}).names(b"/x") == []


def test_directories_in_directories_for_ever(session):
    once = listing(name(b"d", 0o040700))
    state = {"asked": 0}

    def next_listing(_request):
        state["asked"] += 1
        return once[1] if state["asked"] % 2 else struct.pack(">I", 0)

    sftp = session({READDIR: (NAME, next_listing), RMDIR: (STATUS, struct.pack(">I", 0))})
    with pytest.raises(OSError, match="levels"):
        sftp.remove_tree(b"/x")


def test_more_bytes_than_asked_for(session):
    sftp = session({READ: (DATA, text(bytes(100)))})
    with pytest.raises(LinkLost, match="more than"):
        sftp.take_read(sftp.post_read(b"h", 0, memoryview(bytearray(10))))


@pytest.mark.parametrize("said", [9, 11, 1 << 31])
def test_a_count_that_is_not_that_of_the_bytes(session, said):
    sftp = session({READ: (DATA, struct.pack(">I", said) + bytes(10))})
    with pytest.raises(LinkLost, match="more than"):
        sftp.take_read(sftp.post_read(b"h", 0, memoryview(bytearray(10))))


def test_an_answer_of_another_kind(session):
    sftp = session({READ: (HANDLE, text(b"h"))})
    with pytest.raises(LinkLost, match="something else"):
        sftp.take_read(sftp.post_read(b"h", 0, memoryview(bytearray(10))))


@pytest.mark.parametrize("size", [0, 4, (1 << 24) + 6, (1 << 32) - 1])
def test_a_packet_that_cannot_be(session, size):
    """Its length is judged before a byte is set aside for it."""
    sftp = session({})
    sftp._asked.add(7)
    sftp._exactly = lambda count: struct.pack(">IBI", size, DATA, 7)[:count]
    with pytest.raises(LinkLost, match="no packet"):
        sftp.answer(7)


def test_an_endless_small_file(session):
    sftp = session({READ: (DATA, text(bytes(32 << 10)))})
    assert len(sftp.read_small(b"/x", 100_000)) <= 100_000 + (64 << 10)


def test_answers_to_what_was_not_asked(session):
    sftp = session({READ: (DATA + 1000, text(b"x"))})
    with pytest.raises(LinkLost, match="not asked"):
        sftp.take_read(sftp.post_read(b"h", 0, memoryview(bytearray(10))))

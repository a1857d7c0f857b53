"""Bytes of a file that the kernel passes on: as they lie there, over a socket and a pipe, and where it cannot."""

from __future__ import annotations

import os
import socket
import threading

import pytest

from gpuckpt.system.extents import Extent, pass_on
from gpuckpt.system.links import LinkLost, Pace, SocketLink
from gpuckpt.system.pipelink import PipeLink

SIZE = (3 << 20) + 17


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "pack"
    path.write_bytes(os.urandom(SIZE + 1000))
    descriptor = os.open(path, os.O_RDONLY)
    yield path, descriptor
    os.close(descriptor)


def sent_over(link, receive, *parts) -> bytes:
    """What the other side has got when all parts were sent."""
    got: list[bytes] = []

    def take() -> None:
        while chunk := receive():
            got.append(chunk)

    taking = threading.Thread(target=take)
    taking.start()
    try:
        link.send(*parts)
    finally:
        link.close()
        taking.join()
    return b"".join(got)


def over_socket(*parts, pace=None) -> bytes:
    ours, theirs = socket.socketpair()
    with theirs:
        return sent_over(SocketLink(ours, 20, pace), lambda: theirs.recv(1 << 16), *parts)


def over_pipe(*parts) -> bytes:
    silent, unused = os.pipe()
    source, sink = os.pipe()
    link = PipeLink(silent, sink, 20)
    link.close = lambda: os.close(sink)
    try:
        return sent_over(link, lambda: os.read(source, 1 << 16), *parts)
    finally:
        for descriptor in (silent, unused, source):
            os.close(descriptor)


def over_socket_as_a_program_has_it(*parts) -> bytes:
    """No pipe at either end: nothing can be spliced."""
    ours, theirs = socket.socketpair()
    with theirs, ours:
        link = PipeLink(ours.fileno(), ours.fileno(), 20)
        link.close = lambda: ours.shutdown(socket.SHUT_RDWR)
        return sent_over(link, lambda: theirs.recv(1 << 16), *parts)


@pytest.mark.parametrize("way", [over_socket, over_pipe, over_socket_as_a_program_has_it])
def test_an_extent_arrives_between_what_stands_before_and_after_it(file, way):
    path, descriptor = file
    assert way(b"before", Extent(descriptor, 500, SIZE), b"after") == (
        b"before" + path.read_bytes()[500 : 500 + SIZE] + b"after"
    )


def test_an_extent_keeps_to_the_pace(file):
    path, descriptor = file
    pace = Pace(200e6)
    spent: list[int] = []
    spend, pace.spend = pace.spend, lambda count: (spent.append(count), spend(count))
    assert over_socket(Extent(descriptor, 0, SIZE), pace=pace) == path.read_bytes()[:SIZE]
    assert sum(spent) == SIZE
    assert max(spent) <= pace.slice_bytes


@pytest.mark.parametrize("way", [over_socket, over_pipe])
def test_a_file_that_has_become_shorter(file, way):
    path, descriptor = file
    os.truncate(path, 1 << 20)
    with pytest.raises(LinkLost, match="shorter"):
        way(Extent(descriptor, 0, SIZE))


def test_where_the_kernel_hands_nothing_over_it_is_read(file):
    path, descriptor = file
    got = bytearray()

    def refuse(*_):
        raise OSError(22, "Invalid argument")

    def send(content: memoryview) -> int:
        got.extend(content[:1000])
        return min(1000, len(content))

    pass_on(Extent(descriptor, 7, 9000), 4096, refuse, send)
    assert got == path.read_bytes()[7:9007]

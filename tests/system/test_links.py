"""Links to a side that gives next to nothing: as lost as a silent one, and a slow line is not."""

from __future__ import annotations

import contextlib
import socket
import threading
import time

import pytest

from gpuckpt.stores import frames
from gpuckpt.stores.serving import Server
from gpuckpt.stores.ssh import SshStore
from gpuckpt.system.links import Silent, SocketLink
from gpuckpt.system.pipelink import PipeLink
from tests.lines import Line

STALL = 0.5
"""Seconds; at 64 bytes per second 32 bytes must come in that time."""


@pytest.fixture
def ends():
    """(our end, the other side's), and what the other side does in a thread of its own."""
    ours, theirs = socket.socketpair()
    over = threading.Event()
    threads: list[threading.Thread] = []

    def begin(act) -> None:
        def again() -> None:
            with contextlib.suppress(OSError):
                while not over.wait(0.05):
                    act()

        threads.append(threading.Thread(target=again))
        threads[-1].start()

    yield ours, theirs, begin
    over.set()
    for end in (ours, theirs):
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
    for thread in threads:
        thread.join()
    for end in (ours, theirs):
        end.close()


def made(kind: str, ours: socket.socket):
    return SocketLink(ours, STALL) if kind == "socket" else PipeLink(ours.fileno(), ours.fileno(), STALL)


@pytest.mark.parametrize("kind", ["socket", "pipe"])
def test_a_byte_now_and_then_is_silence(ends, kind):
    ours, theirs, begin = ends
    begin(lambda: theirs.send(b"x"))
    link = made(kind, ours)
    with pytest.raises(Silent, match=r"as good as silent: [0-9]+ bytes"):
        link.receive_into(memoryview(bytearray(1000)))


@pytest.mark.parametrize("kind", ["socket", "pipe"])
def test_pieces_that_never_become_a_whole_are_silence(ends, kind):
    """As a banner or an SFTP packet is read: by however many bytes there are."""
    ours, theirs, begin = ends
    begin(lambda: theirs.send(b"x"))
    link = made(kind, ours)
    for _ in range(20):  # each whole: a second in all
        link.receive(1)
        link.whole()
    with pytest.raises(Silent, match="as good as silent"):
        while True:
            link.receive(1)


@pytest.mark.parametrize("kind", ["socket", "pipe"])
def test_a_slow_line_is_waited_for(ends, kind):
    """A modem's share: what is asked for takes longer than the limit, and there is always some progress."""
    ours, theirs, begin = ends
    begin(lambda: theirs.send(bytes(50)))
    begun = time.monotonic()
    made(kind, ours).receive_into(memoryview(bytearray(1000)))
    assert time.monotonic() - begun > STALL


def test_a_far_gpuckpt_that_trickles_is_given_up():
    """It has greeted, and then answers for ever."""

    class Trickling(Server):
        def _open(self, _header, _payload):
            self._link.send(frames._HEAD.pack(b"gpck", 1000, 0))
            while True:
                self._link.send(b" ")
                time.sleep(0.05)

    line = Line(serve=lambda link: Trickling(link).run(), stall_seconds=STALL)
    store = SshStore(line)
    with pytest.raises(Silent, match="as good as silent"):
        store.offer("/srv/job")
    store.close()
    line.ended()

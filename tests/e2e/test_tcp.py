"""TCP: connections inside the tree always go on; those that leave it are decided about, at the dump and the restore."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading

import pytest

from gpuckpt.system import netfilter
from tests import harness
from tests.e2e import rounds
from tests.harness import gpuckpt

pytestmark = pytest.mark.criu


class Peer:
    """The far end, outside the tree: sends back what it gets, and keeps what it got."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.got = b""
        self.ended = ""
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            self._connection = self._listener.accept()[0]
            try:
                while said := self._connection.recv(1000):
                    self.got += said
                    self._connection.sendall(said)
                self.ended = "end"
            except OSError as error:
                self.ended = type(error).__name__

    def numbers(self) -> list[int]:
        """What came, whole lines only."""
        return [int(line) for line in self.got.rpartition(b"\n")[0].split()]

    def close(self) -> None:
        """The far end goes."""
        for one in (self._listener, getattr(self, "_connection", None)):
            if one is not None:
                with contextlib.suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)
                one.close()


@pytest.fixture(autouse=True)
def no_network_lock_stays():
    """CRIU's lock would keep connections of others dead, and one more would stay with every dump."""
    before = {table for table in netfilter.list_tables() if table.name.startswith("CRIU-")}
    yield
    stayed = {table for table in netfilter.list_tables() if table.name.startswith("CRIU-")} - before
    assert not stayed


@pytest.fixture
def peer():
    far = Peer()
    yield far
    far.close()


@pytest.fixture
def job(work, jobs, peer):
    """A caller with an inner connection and one to the peer."""
    started = jobs.python("caller.py", work / "log", "127.0.0.1", peer.port)
    harness.wait_for_count(work / "log", 3)
    jobs.adopt(*rounds.descendants(started.pid))
    return started


def test_a_connection_that_leaves_the_tree_is_refused_by_name(work, job, peer):
    refused = gpuckpt("dump", "--tree", job.pid, work / "img")
    assert rounds.refused(refused) == {"tcp-outside"}
    assert f"127.0.0.1:{peer.port}" in refused.error["message"]
    assert "--tcp close" in refused.error["hint"]
    assert not (work / "img").exists()
    rounds.goes_on(work / "log", harness.numbers(work / "log")[-1])


@pytest.mark.parametrize("said_at", ["dump", "restore"])
def test_closed_the_job_sees_the_end_and_its_inner_connection_goes_on(work, jobs, job, peer, said_at):
    rounds.dump(jobs, job.pid, work / "img", "--tcp", "close" if said_at == "dump" else "keep")
    at_dump = harness.numbers(work / "log")[-1]
    rounds.restore(jobs, work / "img", *(["--tcp", "close"] if said_at == "restore" else []))
    rounds.goes_on(work / "log", at_dump)
    outside = [line for line in (work / "log").read_text().splitlines() if line.startswith("OUTSIDE")]
    assert len(outside) == 1
    assert outside[0].split()[1] in ("END", "BrokenPipeError", "ConnectionResetError")


def test_kept_the_connection_goes_on_with_the_same_far_end(work, jobs, job, peer):
    rounds.dump(jobs, job.pid, work / "img", "--tcp", "keep")
    at_dump = harness.numbers(work / "log")[-1]
    assert peer.ended == ""
    rounds.restore(jobs, work / "img")
    rounds.goes_on(work / "log", at_dump)
    assert "OUTSIDE" not in (work / "log").read_text()
    harness.wait_for(lambda: peer.numbers()[-1] > at_dump + 3, "the far end hears the job")
    assert peer.numbers() == list(range(1, len(peer.numbers()) + 1)), "nothing lost, nothing twice"


def test_kept_but_the_far_end_has_gone_the_job_sees_it(work, jobs, job, peer):
    rounds.dump(jobs, job.pid, work / "img", "--tcp", "keep")
    at_dump = harness.numbers(work / "log")[-1]
    peer.close()
    rounds.restore(jobs, work / "img")
    harness.wait_for(lambda: "OUTSIDE" in (work / "log").read_text(), "the job sees that the far end has gone")
    rounds.goes_on(work / "log", at_dump)


@pytest.mark.parametrize("tcp", ["keep", "close"])
def test_left_running_the_connection_of_the_job_goes_on(work, jobs, job, peer, tcp):
    rounds.dump(jobs, job.pid, work / "img", "--tcp", tcp, "--leave-running")
    at_dump = harness.numbers(work / "log")[-1]
    rounds.goes_on(work / "log", at_dump)
    assert "OUTSIDE" not in (work / "log").read_text()
    assert peer.ended == ""


def test_a_copy_in_another_network_does_not_hold_up_the_connection_of_the_job(work, jobs, job, peer):
    rounds.dump(jobs, job.pid, work / "img", "--tcp", "keep", "--leave-running")
    hook = f"touch {work}/began; until test -e {work}/go; do sleep 0.1; done"
    main = harness.start_gpuckpt("restore", work / "img", "--isolate", "pid,net", "--pre-restore", hook)
    try:
        harness.wait_for((work / "began").exists, "the restore has begun")
        heard = peer.numbers()[-1]
        harness.wait_for(lambda: peer.numbers()[-1] > heard + 3, "the far end hears the job meanwhile", 10)
    finally:
        (work / "go").touch()
        jobs.adopt(json.loads(main.communicate(timeout=60)[0])["data"]["init_pid"])


@pytest.fixture
def port():
    """A port that is free now."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return taken.getsockname()[1]


def ask(kind: int, port: int) -> bytes:
    """What the job answers to 'hello'."""
    with socket.socket(socket.AF_INET, kind) as caller:
        caller.settimeout(30)
        caller.connect(("127.0.0.1", port))
        caller.sendall(b"hello")
        return caller.recv(100)


def test_listening_and_udp_sockets_come_back_and_answer(work, jobs, port):
    job = jobs.python("caller.py", work / "log", "-", "-", port)
    harness.wait_for_count(work / "log", 2)
    rounds.dump(jobs, job.pid, work / "img")
    at_dump = harness.numbers(work / "log")[-1]
    with pytest.raises(OSError, match="refused"):
        ask(socket.SOCK_STREAM, port)

    with socket.create_server(("127.0.0.1", port)):
        taken = gpuckpt("restore", work / "img")
        assert rounds.refused(taken) == {"ports-free"}
        assert f"tcp 127.0.0.1:{port}" in taken.error["message"]
        assert f"by {os.getpid()} " in taken.error["message"]

    rounds.restore(jobs, work / "img")
    rounds.goes_on(work / "log", at_dump)
    assert ask(socket.SOCK_STREAM, port) == b"olleh"
    assert ask(socket.SOCK_DGRAM, port) == b"olleh"

"""Probes against real sockets: who answers well, badly, never, or for ever."""

import contextlib
import datetime as dt
import socket
import subprocess
import sys
import threading
import time

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from gpuckpt.flows.readiness import NotReady, wait_until_ready
from gpuckpt.model.requests import Readiness


@contextlib.contextmanager
def server(answer, family=socket.AF_INET, host="127.0.0.1"):
    """A server that hands each connection to `answer`, in a thread each; gives its port."""
    stop = threading.Event()
    with socket.create_server((host, 0), family=family) as listening:
        listening.settimeout(0.1)
        threads = []

        def serve():
            while not stop.is_set():
                with contextlib.suppress(TimeoutError):
                    connection = listening.accept()[0]
                    threads.append(threading.Thread(target=talk, args=(connection,)))
                    threads[-1].start()

        def talk(connection):
            with connection, contextlib.suppress(OSError):
                answer(connection, stop)

        threads.append(threading.Thread(target=serve))
        threads[0].start()
        try:
            yield listening.getsockname()[1]
        finally:
            stop.set()
            for thread in threads:
                thread.join()


def saying(text):
    def answer(connection, _stop):
        connection.recv(65536)
        connection.sendall(text)

    return answer


def silent(_connection, stop):
    stop.wait()


def dripping(connection, stop):
    """Headers for ever, a byte at a time: no socket's timeout ever passes."""
    connection.sendall(b"HTTP/1.1 200 OK\r\nX-Long: ")
    while not stop.wait(0.02):
        connection.sendall(b"x")


def endless(connection, stop):
    connection.sendall(b"HTTP/1.1 200 OK\r\n")
    while not stop.is_set():
        connection.sendall(b"X-More: and more\r\n" * 100)


def going_on(connection, stop):
    """Never anything but 100 Continue."""
    while not stop.wait(0.01):
        connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")


def probe(seconds=60.0, **what):
    return wait_until_ready(Readiness(timeout_seconds=seconds, **what), {}, lambda: None)


@pytest.mark.parametrize(
    "status", ["200 OK", "204 No Content", "302 Found\r\nLocation: http://127.0.0.1:9/", "301 Moved\r\nLocation: file:///etc/passwd"]
)  # fmt: skip
def test_2xx_and_3xx_are_ready_and_no_redirect_is_followed(status):
    with server(saying(f"HTTP/1.1 {status}\r\n\r\n".encode())) as port:
        probe(url=f"http://127.0.0.1:{port}/health?x=1")


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (saying(b"HTTP/1.1 503 Busy\r\n\r\n"), "it answered 503"),
        (saying(b"HTTP/1.1 404 Not Found\r\n\r\n"), "it answered 404"),
        (saying(b"SSH-2.0-OpenSSH_9.2\r\n"), "SSH-2.0"),
        (saying(b""), "closed connection"),
        (endless, "more than 100 headers"),
        (silent, ""),
        (dripping, "no answer"),
        (going_on, "no answer"),
    ],
    ids=["503", "404", "ssh", "nothing", "endless", "silent", "dripping", "going on"],
)
def test_anything_else_is_not_and_holds_nobody_up(answer, why):
    before = set(threading.enumerate())
    with server(answer) as port:
        with pytest.raises(NotReady) as error:
            probe(2, url=f"http://127.0.0.1:{port}/")
        for thread in set(threading.enumerate()) - before:
            if thread.name == "probe":
                thread.join(30)
                assert not thread.is_alive(), "its socket was cut, whatever the server does"
    assert str(error.value).startswith(f"--ready-http http://127.0.0.1:{port}/: ")
    assert why in str(error.value)


def self_signed(place):
    """A certificate for another name, and its key, in one file."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "another.example")])
    now = dt.datetime.now(dt.timezone.utc)
    builder = x509.CertificateBuilder(name, name, key.public_key(), 1, now, now + dt.timedelta(days=1))
    pem = builder.sign(key, hashes.SHA256()).public_bytes(Encoding.PEM)
    pem += key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    place.write_bytes(pem)
    return place


SECURE = """
import http.server, ssl, sys
context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
context.load_cert_chain(sys.argv[1])
server = http.server.HTTPServer(("127.0.0.1", 0), http.server.SimpleHTTPRequestHandler)
server.socket = context.wrap_socket(server.socket, server_side=True)
print(server.server_port, flush=True)
server.serve_forever()
"""


def test_a_tls_service_with_any_certificate_is_asked_and_a_plain_one_is_no_tls_service(tmp_path, jobs):
    # Its own process: Python's TLS server leaves a socket open where the client has gone before the handshake.
    argv = (sys.executable, "-c", SECURE, self_signed(tmp_path / "pem"))
    secure = jobs.start(*argv, stdout=subprocess.PIPE, cwd=tmp_path)
    probe(url=f"https://127.0.0.1:{int(secure.stdout.readline())}/")
    with server(saying(b"HTTP/1.1 200 OK\r\n\r\n")) as port, pytest.raises(NotReady, match="--ready-http https"):
        probe(2, url=f"https://127.0.0.1:{port}/")


def test_a_port_that_opens_late_and_one_that_never_does():
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        port = reserved.getsockname()[1]
        with pytest.raises(NotReady, match="refused"):
            probe(2, address=("127.0.0.1", port))
        threading.Timer(0.5, reserved.listen).start()
        probe(address=("127.0.0.1", port))


def test_ipv6():
    with server(saying(b"HTTP/1.1 200 OK\r\n\r\n"), socket.AF_INET6, "::1") as port:
        probe(address=("::1", port), url=f"http://[::1]:{port}")


def test_a_command_is_tried_again_and_all_must_be_ready(tmp_path):
    command = f"echo x >>{tmp_path}/tries; [ $(wc -l <{tmp_path}/tries) -ge 3 ]"
    with server(silent) as port:
        assert probe(command=command, address=("127.0.0.1", port)) > 0
        assert (tmp_path / "tries").read_text() == "x\n" * 3
        with pytest.raises(NotReady, match="--ready-cmd: exited with 1: not yet"):
            probe(2, command="echo not yet; false", address=("127.0.0.1", port))


class Enough(Exception):
    """What a check raises."""


@pytest.mark.parametrize("what", ["url", "command"])
def test_a_check_ends_it_in_the_middle_of_an_attempt(what):
    deadline = time.monotonic() + 0.5

    def check():
        if time.monotonic() > deadline:
            raise Enough

    with server(silent) as port, pytest.raises(Enough):
        readiness = {"url": f"http://127.0.0.1:{port}"} if what == "url" else {"command": "sleep 1000"}
        wait_until_ready(Readiness(**readiness, timeout_seconds=1000), {}, check)


class ToItself(socket.socket):
    """A socket for which the kernel has chosen the very port that is asked for."""

    def connect(self, where):
        self.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.bind(where)
        super().connect(where)


def test_a_port_nobody_listens_on_is_not_taken_for_its_own_answer(monkeypatch):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    monkeypatch.setattr(socket, "socket", ToItself)
    with pytest.raises(NotReady, match="nobody listens"):
        probe(2, address=("127.0.0.1", port))

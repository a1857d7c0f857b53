"""Asking a service whether it serves, by a connection or by HTTP, in threads that nobody has to wait for."""

from __future__ import annotations

import contextlib
import http.client
import socket
import ssl
import threading
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from gpuckpt.model.errors import in_words

if TYPE_CHECKING:
    from collections.abc import Callable

READY_STATUSES = range(200, 400)


class Attempt:
    """One attempt. When it is `over`, `problem` says why it is not ready, or is None.

    A peer that never answers, or gives a byte a minute, cannot be waited for with a socket's own timeout: that
    counts from byte to byte.
    """

    def __init__(self, ask: Callable[[Attempt], None]) -> None:
        self.problem: str | None = None
        self.over = threading.Event()
        self._ask = ask
        self._socket: socket.socket | None = None
        threading.Thread(target=self._run, name="probe", daemon=True).start()

    def _run(self) -> None:
        try:
            self._ask(self)
        except (OSError, http.client.HTTPException, ValueError) as error:
            self.problem = in_words(error) or type(error).__name__
        finally:
            self.over.set()

    def uses(self, connection: socket.socket) -> None:
        """The socket that `cancel` must cut."""
        self._socket = connection

    def cancel(self) -> None:
        """Nobody waits for it any more."""
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)


def tcp(address: tuple[str, int], seconds: float) -> Attempt:
    """Whether something takes a connection there."""

    def ask(attempt: Attempt) -> None:
        _connect(attempt, address, seconds).close()

    return Attempt(ask)


def web(url: str, seconds: float) -> Attempt:
    """Whether GET is answered with 2xx or 3xx. No redirect is followed, no proxy asked, no certificate checked.

    As kubelet's probes: it goes to the service itself, which often has a certificate for another name, and sends
    nothing that is secret.
    """
    parts = urlsplit(url)
    secure = parts.scheme == "https"
    host, port = parts.hostname or "", parts.port or (443 if secure else 80)
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")

    def ask(attempt: Attempt) -> None:
        connection = http.client.HTTPConnection(host, port)
        connection.sock = _connect(attempt, (host, port), seconds, _unverified() if secure else None)
        try:
            connection.request("GET", path, headers={"User-Agent": "gpuckpt", "Connection": "close"})
            with connection.getresponse() as response:
                status = response.status
        finally:
            connection.close()
        if status not in READY_STATUSES:
            raise ValueError(f"it answered {status}")

    return Attempt(ask)


def _connect(
    attempt: Attempt, address: tuple[str, int], seconds: float, secure: ssl.SSLContext | None = None
) -> socket.socket:
    """A connection to the first address of a host that takes one; by TLS with `secure`. Raises OSError."""
    problem = OSError("the name has no address")
    for family, kind, protocol, _, where in socket.getaddrinfo(*address, type=socket.SOCK_STREAM):
        connection = socket.socket(family, kind, protocol)
        if secure is not None:
            # Before it is connected: wrap_socket loses, open, a socket whose peer goes away in the middle of it.
            connection = secure.wrap_socket(connection, server_hostname=address[0])
        connection.settimeout(seconds)
        attempt.uses(connection)
        try:
            connection.connect(where)
            _refuse_itself(connection)
        except OSError as error:
            connection.close()
            problem = error
        else:
            return connection
    raise problem


def _refuse_itself(connection: socket.socket) -> None:
    """TCP connects a socket to itself where the kernel happens to choose the very port that is asked for."""
    if connection.getsockname() == connection.getpeername():
        raise ConnectionRefusedError("nobody listens there")


def _unverified() -> ssl.SSLContext:
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context

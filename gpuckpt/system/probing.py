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

    def ask(_: Attempt) -> None:
        _connect(address, seconds).close()

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
        raw = _connect((host, port), seconds)
        attempt.uses(raw)
        connection = http.client.HTTPConnection(host, port)
        try:
            connection.sock = _unverified().wrap_socket(raw, server_hostname=host) if secure else raw
            attempt.uses(connection.sock)
            connection.request("GET", path, headers={"User-Agent": "gpuckpt", "Connection": "close"})
            status = connection.getresponse().status
        finally:
            raw.close()
            connection.close()
        if status not in READY_STATUSES:
            raise ValueError(f"it answered {status}")

    return Attempt(ask)


def _connect(address: tuple[str, int], seconds: float) -> socket.socket:
    connection = socket.create_connection(address, timeout=seconds)
    if connection.getsockname() == connection.getpeername():
        # TCP connects a socket to itself where the kernel happens to choose the very port that is asked for.
        connection.close()
        raise ConnectionRefusedError(f"{address[0]} port {address[1]}: nobody listens")
    return connection


def _unverified() -> ssl.SSLContext:
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context

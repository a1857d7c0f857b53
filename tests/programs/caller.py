"""A job with TCP connections: caller.py LOG HOST PORT [LISTEN-PORT]

A child answers through an inner connection; another connection leads to HOST:PORT. Each number goes round
through the inner one, and then to the far end, which sends it back. LOG gets the number, and what the far end
gives when it is no longer the number: 'OUTSIDE WHY' once. With LISTEN-PORT it also answers whoever connects
there, over TCP and UDP.
"""

import itertools
import os
import select
import socket
import sys
import time

PAUSE_SECONDS = 0.03
PATIENCE_SECONDS = 20


def answer_for_ever(listener: socket.socket) -> None:
    """The child: send back what comes, end with the connection."""
    inner = socket.create_connection(listener.getsockname())
    listener.close()
    while said := inner.recv(100):
        inner.sendall(said)
    os._exit(0)


def exchange(connection: socket.socket, number: int) -> str:
    """'' when the far end has sent the number back, else what happened."""
    text = b"%d\n" % number
    try:
        connection.sendall(text)
        back = b""
        while len(back) < len(text):
            if not select.select([connection], [], [], PATIENCE_SECONDS)[0]:
                return "SILENCE"
            piece = connection.recv(100)
            if not piece:
                return "END"
            back += piece
    except OSError as error:
        return type(error).__name__
    return "" if back == text else f"OTHER {back!r}"


def serve(listeners: list[socket.socket]) -> None:
    """Answer whoever has come."""
    for ready in select.select(listeners, [], [], 0)[0]:
        if ready.type == socket.SOCK_DGRAM:
            said, who = ready.recvfrom(100)
            ready.sendto(said[::-1], who)
        else:
            with ready.accept()[0] as guest:
                guest.sendall(guest.recv(100)[::-1])


def main(path: str, host: str, port: str, listen_port: str = "") -> None:
    """Call for ever."""
    log = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    listener = socket.create_server(("127.0.0.1", 0))
    if os.fork() == 0:
        answer_for_ever(listener)
    inner = listener.accept()[0]
    listener.close()
    outside = socket.create_connection((host, int(port))) if port != "-" else None
    listeners = []
    if listen_port:
        listeners.append(socket.create_server(("127.0.0.1", int(listen_port))))
        listeners.append(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
        listeners[1].bind(("127.0.0.1", int(listen_port)))
    for number in itertools.count(1):
        if why := exchange(inner, number):
            os.write(log, f"BROKEN {why}\n".encode())
            return
        if outside is not None and (why := exchange(outside, number)):
            os.write(log, f"OUTSIDE {why}\n".encode())
            outside.close()
            outside = None
        serve(listeners)
        os.write(log, b"%d\n" % number)
        time.sleep(PAUSE_SECONDS)


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Two processes that count together over a connection between them: paired_counter.py LOG [MB] [FILE] [tcp|unix]

The parent sends a rising number to its child, and only when the child has sent it back it stands in the
log: a log that grows proves that both processes run and that their connection lives. Fifty a second. With
FILE it holds that file open under a name that is gone while another name of it stays, as of a semaphore.
"""

from __future__ import annotations

import os
import socket
import sys
import time


def hold_linked(path: str) -> int:
    """Open a file, give it another name, remove the first."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    os.write(handle, b"content of the linked file\n")
    os.link(path, path + ".other")
    os.unlink(path)
    return handle


def connected(kind: str) -> tuple[socket.socket, socket.socket]:
    """Two ends of one connection."""
    if kind == "unix":
        return socket.socketpair()
    listener = socket.create_server(("127.0.0.1", 0))
    ours = socket.create_connection(listener.getsockname())
    theirs, _ = listener.accept()
    listener.close()
    return ours, theirs


def main(path: str, megabytes: int = 1, linked: str = "", kind: str = "tcp") -> None:
    """Count for ever."""
    os.closerange(3, 4096)  # a daemon holds nothing of those who started it
    if linked:
        hold_linked(linked)
    log = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    ours, theirs = connected(kind)
    if os.fork() == 0:
        ours.close()
        while number := theirs.recv(64):
            theirs.sendall(number)
        os._exit(0)
    theirs.close()
    memory = os.urandom(megabytes * 1_000_000)
    count = 0
    while memory:
        count += 1
        ours.sendall(b"%d\n" % count)
        answer = ours.recv(64)
        assert int(answer) == count, (answer, count)
        os.write(log, answer)
        time.sleep(0.02)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:3]), *sys.argv[3:])

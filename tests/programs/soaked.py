"""The small trees of the soak: soaked.py KIND LOG

A rising number is written to LOG fifty times a second, each only when all that the kind is made of has worked
once more, so that a LOG which grows proves a tree that is alive as a whole:

one      a single process
pair     the number goes to a child and back through two pipes, and both see it in memory that they share
tcp      the number goes to a child and back through a TCP connection of the tree
stopped  as `one`, and a child that stops itself whenever it is woken, after it has written 'WOKE'
"""

import mmap
import os
import signal
import socket
import sys
import time

PAUSE_SECONDS = 0.02


def pair():
    """A child at the end of two pipes, with a page of shared memory; returns what a number does."""
    shared = mmap.mmap(-1, 4096)
    down, up = os.pipe(), os.pipe()
    if os.fork() == 0:
        os.close(down[1])
        os.close(up[0])
        while text := os.read(down[0], 64):
            shared[:8] = int(text).to_bytes(8, "little")
            os.write(up[1], text)
        os._exit(0)
    os.close(down[0])
    os.close(up[1])

    def exchange(number):
        os.write(down[1], b"%d" % number)
        assert int(os.read(up[0], 64)) == number
        assert int.from_bytes(shared[:8], "little") == number

    return exchange


def tcp():
    """A child at the far end of a TCP connection."""
    listener = socket.create_server(("127.0.0.1", 0))
    ours = socket.create_connection(listener.getsockname())
    theirs, _ = listener.accept()
    listener.close()
    if os.fork() == 0:
        ours.close()
        while text := theirs.recv(64):
            theirs.sendall(text)
        os._exit(0)
    theirs.close()

    def exchange(number):
        ours.sendall(b"%d" % number)
        assert int(ours.recv(64)) == number

    return exchange


def stopped(log):
    """A child that stands still."""
    if os.fork() == 0:
        while True:
            os.kill(os.getpid(), signal.SIGSTOP)
            os.write(log, b"WOKE\n")
    return lambda _: None


def main(kind, path):
    """Count for ever."""
    os.closerange(3, 1024)
    log = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    exchange = {"one": lambda: lambda _: None, "pair": pair, "tcp": tcp, "stopped": lambda: stopped(log)}[kind]()
    number = 0
    while True:
        number += 1
        exchange(number)
        os.write(log, b"%d\n" % number)
        time.sleep(PAUSE_SECONDS)


if __name__ == "__main__":
    main(*sys.argv[1:])

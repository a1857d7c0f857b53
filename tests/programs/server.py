"""An engine in small: server.py PORT NAME [MEGABYTES]

Listens at 0.0.0.0:PORT. Each connection gets one JSON line: `count` rises by one with each, after all of the memory
was read and found as it was written at the start (`memory` is 'whole'), and after a worker process, woken by a
POSIX semaphore whose name is gone, has counted in the file /dev/shm/NAME, which both map. NAME 'none': no such file,
no worker, no semaphore.
"""

from __future__ import annotations

import json
import mmap
import multiprocessing
import os
import signal
import socket
import struct
import sys
import time
import zlib


class Worker:
    """The process that counts, and the memory it counts in."""

    def __init__(self, name: str) -> None:
        self._file = os.open(f"/dev/shm/{name}", os.O_RDWR | os.O_CREAT, 0o600)
        os.ftruncate(self._file, 1 << 20)
        self._memory = mmap.mmap(self._file, 1 << 20)
        self._memory[4096:16384] = b"x" * 12288
        self._wanted = multiprocessing.get_context("fork").Semaphore(0)
        if os.fork() == 0:
            while True:
                self._wanted.acquire()
                self._memory[:8] = struct.pack("q", self.count + 1)

    @property
    def count(self) -> int:
        return struct.unpack("q", self._memory[:8])[0]

    def next(self) -> int:
        before = self.count
        self._wanted.release()
        while self.count == before:
            time.sleep(0.005)
        return self.count


class Counter:
    """The same without anything shared."""

    count = 0

    def next(self) -> int:
        self.count += 1
        return self.count


def main(port: int, name: str, megabytes: int) -> None:
    signal.signal(signal.SIGTERM, lambda *_: os._exit(7))
    memory = os.urandom(megabytes << 20)
    total = zlib.crc32(memory)
    counter = Counter() if name == "none" else Worker(name)
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("0.0.0.0", port))
        listener.listen()
        while True:
            caller, _ = listener.accept()
            with caller:
                whole = zlib.crc32(memory) == total
                said = {"count": counter.next(), "memory": "whole" if whole else "broken", "pid": os.getpid()}
                caller.sendall(json.dumps(said).encode() + b"\n")


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]) if len(sys.argv) > 3 else 1)

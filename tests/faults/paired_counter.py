"""Two processes that count together over a TCP connection between them: paired_counter.py LOG [MB]

The parent sends a rising number to its child, and only when the child has sent it back it stands in the
log: a log that grows proves that both processes run and that their connection lives. Fifty a second.
"""

import os
import socket
import sys
import time


def main(path: str, megabytes: int) -> None:
    """Count for ever."""
    os.closerange(3, 4096)  # a daemon holds nothing of those who started it
    log = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    listener = socket.create_server(("127.0.0.1", 0))
    ours = socket.create_connection(listener.getsockname())
    theirs, _ = listener.accept()
    listener.close()
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
    main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 1)

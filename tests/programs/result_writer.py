"""A job that keeps one file open and writes its result when it may: result_writer.py FILE GO

A child of it only sleeps. When the file GO is there the result is written, the child ended, and the job as well.
"""

import os
import signal
import sys
import time


def main(path: str, go: str) -> None:
    """Wait, then write."""
    result = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o640)
    os.write(result, b"begun\n")
    child = os.fork()
    while not child:
        time.sleep(1)
    while not os.path.exists(go):
        time.sleep(0.02)
    os.write(result, b"result\n")
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


if __name__ == "__main__":
    main(*sys.argv[1:])

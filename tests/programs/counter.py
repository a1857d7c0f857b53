"""The CPU twin of gpu_counter.py: counter.py LOG [MB]

Appends a rising integer, one a line, ten times a second, through one descriptor opened at the start. Holds
MB million bytes of random memory; SIGUSR1 digests it again and appends 'XSUM HEX', or 'BROKEN HEX' when it
is no longer what it was.
"""

import hashlib
import os
import signal
import sys
import time


def main(path: str, megabytes: int) -> None:
    """Count for ever."""
    log = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    memory = os.urandom(megabytes * 1_000_000)
    expected = hashlib.sha256(memory).hexdigest()

    def say_checksum(_signal: int, _frame: object) -> None:
        found = hashlib.sha256(memory).hexdigest()
        word = "XSUM" if found == expected else "BROKEN"
        os.write(log, f"{word} {found}\n".encode())

    signal.signal(signal.SIGUSR1, say_checksum)
    count = 0
    while True:
        count += 1
        os.write(log, b"%d\n" % count)
        time.sleep(0.1)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 1)

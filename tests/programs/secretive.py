"""A counter with a secret in each place that an image may keep it (secret_places.py): secretive.py LOG FILE SECRET

SECRET stands in argv, and in other forms in the environment (which the test sets), in memory, and in the name and the
content of FILE, which stays open for writing.
"""

import os
import sys
import time


def main(log: str, file: str, secret: str) -> None:
    """Count for ever, as long as nothing of it changes."""
    key = secret.removeprefix("A-")
    kept = bytearray(f"M-{key}".encode()) * 4096
    opened = os.open(file, os.O_RDWR | os.O_CREAT, 0o600)
    os.write(opened, f"C-{key}\n".encode() * 100)
    output = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    count = 0
    while True:
        count += 1
        whole = kept == bytearray(f"M-{key}".encode()) * 4096 and f"C-{key}".encode() in os.pread(opened, 100, 0)
        os.write(output, b"%d\n" % count if whole else b"BROKEN\n")
        time.sleep(0.1)


main(*sys.argv[1:])

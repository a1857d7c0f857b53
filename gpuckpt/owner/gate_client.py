"""The gate's far end: CRIU starts this at post-dump and post-restore, and does what it exits with.

It runs alone (`python -I -S`, no package around it), asks the owner over the socket in GPUCKPT_GATE
and exits 0 only on the byte `C`. A refused connection, an end of file or anything else is 1: CRIU
then undoes everything (dump) or ends what it built (restore).
"""

import os
import socket
import sys


def main() -> int:
    """Ask the owner, wait for its answer however long it takes."""
    try:
        gate = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        gate.connect(os.environ["GPUCKPT_GATE"])
        gate.sendall(os.environ["CRTOOLS_SCRIPT_ACTION"].encode() + b"\n")
        return 0 if gate.recv(1) == b"C" else 1
    except (OSError, KeyError):
        return 1


if __name__ == "__main__":
    sys.exit(main())

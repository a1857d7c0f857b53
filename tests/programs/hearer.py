"""A job that is spoken to all the time: hearer.py LOG HOST PORT

Writes into LOG each line that HOST:PORT sends, which are numbers; 'OUTSIDE WHY' when it sends no more.
"""

import os
import socket
import sys


def main(path: str, host: str, port: str) -> None:
    """Listen for ever."""
    log = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    with socket.create_connection((host, int(port))) as outside:
        said = b""
        try:
            while piece := outside.recv(1000):
                lines, newline, said = (said + piece).rpartition(b"\n")
                os.write(log, lines + newline)
            why = "END"
        except OSError as error:
            why = type(error).__name__
    os.write(log, f"OUTSIDE {why}\n".encode())


if __name__ == "__main__":
    main(*sys.argv[1:])

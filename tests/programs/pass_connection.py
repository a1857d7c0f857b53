"""A ProxyCommand for ssh's ProxyUseFdpass: pass_connection.py ADDRESS PORT

Connects, hands the connection to ssh over its standard output, and ends.
"""

import socket
import sys


def main(address: str, port: str) -> None:
    """Hand over a connection."""
    with socket.create_connection((address, int(port)), 20) as there:
        there.setblocking(True)
        with socket.socket(fileno=1) as ssh:
            socket.send_fds(ssh, [b"\0"], [there.fileno()])


if __name__ == "__main__":
    main(*sys.argv[1:])

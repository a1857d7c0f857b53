"""A web service: web.py DIRECTORY

Listens on a free port of 127.0.0.1, which it writes to DIRECTORY/port. Answers 200 once DIRECTORY/up is there, 503
before. SIGUSR1 closes a connection it holds to the port in DIRECTORY/peer, if that is there when it starts.
"""

import os
import signal
import socket
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

PLACE = Path(sys.argv[1])


class Handler(BaseHTTPRequestHandler):
    """Answers every GET."""

    def do_GET(self) -> None:
        self.send_response(200 if (PLACE / "up").exists() else 503)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Nothing is said."""


def main() -> None:
    """Serve for ever."""
    if (PLACE / "peer").exists():
        peer = socket.create_connection(("127.0.0.1", int((PLACE / "peer").read_text())))

        def let_go(_signal: int, _frame: object) -> None:
            peer.close()
            (PLACE / "closed").touch()

        signal.signal(signal.SIGUSR1, let_go)
    server = HTTPServer(("127.0.0.1", 0), Handler)
    (PLACE / "new").write_text(str(server.server_port))
    os.rename(PLACE / "new", PLACE / "port")
    server.serve_forever()


main()

"""`gpuckpt serve`: the far side of push, pull and inspect, started by ssh; nobody types it."""

from __future__ import annotations

import os

STDIN, STDOUT = 0, 1


def serve() -> int:
    """Answer another gpuckpt on stdin and stdout."""
    from gpuckpt.flows import serving  # noqa: PLC0415  --help and TAB must not load the flows

    os.umask(0o077)
    serving.serve(STDIN, STDOUT)
    return 0

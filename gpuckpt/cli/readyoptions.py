"""How a tree that was brought back shows that it serves again: the options of restore and migrate."""

from __future__ import annotations

from typing import Annotated

import typer

from gpuckpt.cli import options

ReadyCmd = Annotated[
    str | None,
    typer.Option("--ready-cmd", metavar="COMMAND", help="The tree is ready when this ends with 0. Tried repeatedly."),
]
ReadyHttp = Annotated[
    str | None,
    typer.Option(
        "--ready-http",
        metavar="URL",
        parser=options.url,
        help="The tree is ready when this is answered with 2xx or 3xx.",
    ),
]
ReadyTcp = Annotated[
    str | None,
    typer.Option(
        "--ready-tcp",
        metavar="HOST:PORT",
        parser=options.address,
        help="The tree is ready when this takes a connection.",
    ),
]
ReadyTimeout = Annotated[
    float,
    typer.Option(
        "--ready-timeout", metavar="SECONDS", parser=options.limit, help="How long it may take to become ready."
    ),
]
ColdStart = Annotated[
    float | None,
    typer.Option(
        "--cold-start-seconds",
        metavar="SECONDS",
        parser=options.limit,
        help="How long a start from nothing takes: shown beside how long this took.",
    ),
]

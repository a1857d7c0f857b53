"""How a tree that was brought back shows that it serves again: the options of restore and migrate."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated

import typer

from gpuckpt.cli import options
from gpuckpt.model.errors import UsageError

if TYPE_CHECKING:
    from gpuckpt.model.requests import Readiness


def url(text: str) -> str:
    """An address of http or https, without a name and password in it: reports show it."""
    from urllib.parse import urlsplit  # noqa: PLC0415  only --ready-http needs it

    if not text:
        return text
    try:
        parts = urlsplit(text)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        usable = False
    if not usable or not text.isascii() or any(letter <= " " or letter == "\x7f" for letter in text):
        raise typer.BadParameter(f"{text!r} is no URL such as http://127.0.0.1:8000/health.")
    if parts.username is not None or parts.password is not None:
        raise typer.BadParameter("a name and a password in the URL would stand in reports: use --ready-cmd.")
    return text


def address(text: str) -> str:
    """HOST:PORT as text, looked at."""
    if text:
        _address(text)
    return text


def _address(text: str) -> tuple[str, int]:
    match = re.fullmatch(
        r"(?:\[(?P<six>[0-9A-Fa-f:.]+(?:%[\w.-]+)?)\]|(?P<host>[^\s:\[\]]+)):(?P<port>[0-9]{1,5})", text
    )
    if match is None or not 0 < int(match["port"]) < 1 << 16:
        raise typer.BadParameter(f"{text!r} is not HOST:PORT, such as 127.0.0.1:8000 or [::1]:8000.")
    return match["six"] or match["host"], int(match["port"])


ReadyCmd = Annotated[
    str | None,
    typer.Option("--ready-cmd", metavar="COMMAND", help="The tree is ready when this ends with 0. Tried repeatedly."),
]
ReadyHttp = Annotated[
    str | None,
    typer.Option(
        "--ready-http",
        metavar="URL",
        parser=url,
        help="The tree is ready when this is answered with 2xx or 3xx.",
    ),
]
ReadyTcp = Annotated[
    str | None,
    typer.Option(
        "--ready-tcp",
        metavar="HOST:PORT",
        parser=address,
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


def readiness(
    command: str | None, url: str | None, address: str | None, timeout_seconds: float, cold_start: float | None
) -> Readiness:
    """How a restored tree shows that it is ready; an empty text is none."""
    from gpuckpt.model.requests import Readiness  # noqa: PLC0415

    found = Readiness(
        command=options.command_line(command),
        url=url or None,
        address=_address(address) if address else None,
        timeout_seconds=timeout_seconds,
        cold_start_seconds=cold_start,
    )
    if cold_start is not None and not found.asked_for:
        hint = "say when the restored tree is ready: --ready-http, --ready-tcp or --ready-cmd"
        raise UsageError("--cold-start-seconds has nothing to compare with", hint)
    return found

"""`gpuckpt pull`: an image of another host to here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from gpuckpt.cli import completing, options
from gpuckpt.cli.manner import Manner
from gpuckpt.cli.reaching import TO_CARRY, Ways, with_ways
from gpuckpt.cli.session import carry_out
from gpuckpt.model.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

    from gpuckpt.cli.session import Listener
    from gpuckpt.model.report import Report
    from gpuckpt.model.requests import PullRequest


@with_ways(TO_CARRY)
def pull(
    source: Annotated[
        str,
        typer.Argument(
            metavar="USER@HOST:IMAGE",
            autocompletion=completing.complete_host,
            help="The image on the other host; of DIR/latest the one it leads to.",
        ),
    ],
    directory: Annotated[
        str,
        typer.Argument(
            metavar="DIR",
            autocompletion=options.complete_image,
            help="The directory here in which the image shall stand, by its name. By default the current one.",
        ),
    ] = ".",
    *,
    ways: Ways,
    verify_only: options.VerifyOnly = False,
    allowed_signers: options.AllowedSigners = None,
    timeout: options.Timeout = None,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
) -> int:
    """Copy an image from another host over SSH.

    What was interrupted is continued by the same command. The image stands here, under its name, only when
    every byte was verified.
    """
    where = options.location(source)
    name = where.path.rstrip("/").rpartition("/")[2]
    if name in ("", ".", "..", "~"):
        raise UsageError(f"{source}: no image is named", "write user@host:/path/of/the/image")
    from gpuckpt.model.requests import PullRequest  # noqa: PLC0415  --help and TAB need no request

    request = PullRequest(
        reach=ways.reach(where.at(where.path.rstrip("/"))),
        directory=options.absolute(directory),
        verify_only=verify_only,
        timeout_seconds=timeout,
        allowed_signers=None if allowed_signers is None else options.absolute(allowed_signers),
    )
    return carry_out(
        Manner(as_json, quiet, verbose),
        lambda listener: _run(request, listener),
        "moving",
        lambda work: _apart(request, work),
    )


def _run(request: PullRequest, listener: Listener) -> Report:
    from gpuckpt.flows import moving  # noqa: PLC0415  --help and TAB must not load the flows

    return moving.pull(request, listener)


def _apart(request: PullRequest, work: Callable[[], int]) -> int:
    from gpuckpt.flows import apart  # noqa: PLC0415  as above

    return apart.pull(request, work)

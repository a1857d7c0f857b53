"""`gpuckpt push`: an image to another host."""

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
    from gpuckpt.model.requests import PushRequest


@with_ways(TO_CARRY)
def push(
    image: Annotated[
        str,
        typer.Argument(metavar="IMAGE", autocompletion=options.complete_image, help="The directory of the image."),
    ],
    target: Annotated[
        str,
        typer.Argument(
            metavar="USER@HOST:DIR",
            autocompletion=completing.complete_host,
            help="The directory on the other host in which the image shall stand, by its name.",
        ),
    ],
    *,
    ways: Ways,
    verify_only: options.VerifyOnly = False,
    delete_source: Annotated[
        bool,
        typer.Option("--delete-source", help="Remove IMAGE here once every byte of the copy was verified there."),
    ] = False,
    timeout: options.Timeout = None,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
) -> int:
    """Copy an image to another host over SSH.

    What was interrupted is continued by the same command. The image stands there, under its name, only when
    every byte was verified.
    """
    if verify_only and delete_source:
        raise UsageError(
            "--verify-only and --delete-source exclude each other", "verify first, then push with the other"
        )
    where = options.location(target)
    from gpuckpt.model.requests import PushRequest  # noqa: PLC0415  --help and TAB need no request

    request = PushRequest(
        image=options.absolute(image),
        reach=ways.reach(where),
        verify_only=verify_only,
        delete_source=delete_source,
        timeout_seconds=timeout,
    )
    return carry_out(
        Manner(as_json, quiet, verbose),
        lambda listener: _run(request, listener),
        "moving",
        lambda work: _apart(request, work),
    )


def _run(request: PushRequest, listener: Listener) -> Report:
    from gpuckpt.flows import moving  # noqa: PLC0415  --help and TAB must not load the flows

    return moving.push(request, listener)


def _apart(request: PushRequest, work: Callable[[], int]) -> int:
    from gpuckpt.flows import apart  # noqa: PLC0415  as above

    return apart.push(request, work)

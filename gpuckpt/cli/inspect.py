"""`gpuckpt inspect`: what an image, a running tree or this host is."""

from __future__ import annotations

from typing import Annotated

import typer

from gpuckpt.cli import options
from gpuckpt.cli.manner import Manner
from gpuckpt.cli.reaching import TO_ASK, Ways, with_ways
from gpuckpt.cli.session import Listener, carry_out
from gpuckpt.model.errors import UsageError
from gpuckpt.model.location import Location
from gpuckpt.model.report import Report
from gpuckpt.model.requests import InspectRequest


@with_ways(TO_ASK)
def inspect(
    context: typer.Context,
    target: Annotated[
        str | None,
        typer.Argument(
            metavar="TARGET",
            autocompletion=options.complete_image,
            help="The directory of an image, or of a series of images; also user@host:/path of an image; user@host: "
            "is that host. Without it and without --tree: this host.",
        ),
    ] = None,
    *,
    tree: Annotated[
        int | None,
        typer.Option(
            "--tree",
            metavar="PID",
            parser=options.pid,
            autocompletion=options.complete_pid,
            help="A running tree: what a dump would hold, and what would stop it.",
        ),
    ] = None,
    verify: Annotated[bool, typer.Option("--verify", help="Read and check every byte of the image.")] = False,
    extract: Annotated[
        str | None,
        typer.Option(
            "--extract",
            metavar="DIR",
            help="Write the image as a plain CRIU directory, which must not exist, and print the commands for it.",
        ),
    ] = None,
    show_config: Annotated[
        bool,
        typer.Option("--show-config", help="Show each option's value in force, and the file that gives it."),
    ] = False,
    keep_argv: options.KeepArgv = False,
    identity: options.Identity = None,
    allowed_signers: options.AllowedSigners = None,
    ways: Ways,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
) -> int:
    """Say what an image, a running tree or this host is, and what can be done with it."""
    if show_config:
        if target is not None or tree is not None:
            raise UsageError("--show-config looks at files only", "leave TARGET and --tree out")
        return _show_config(context, Manner(as_json, quiet, verbose))
    if target is not None and tree is not None:
        raise UsageError("TARGET and --tree are both given", "name an image or a process, not both")
    if verify and target is None:
        raise UsageError("--verify needs an image", "name the directory of the image")
    if extract is not None and target is None:
        raise UsageError("--extract needs an image", "name the directory of the image")
    where = None if target is None else options.elsewhere(target)
    if where is None:
        ways.refuse_here()
    else:
        _refuse_what_is_only_for_here(where, verify=verify, extract=extract, identity=identity)
    request = InspectRequest(
        target=None if target is None or where is not None else options.absolute(target),
        remote=None if where is None else ways.reach(where),
        pid=tree,
        verify=verify,
        keep_argv=keep_argv,
        extract=None if extract is None else options.absolute(extract),
        identity=None if identity is None else options.absolute(identity),
        allowed_signers=None if allowed_signers is None else options.absolute(allowed_signers),
    )
    return carry_out(Manner(as_json, quiet, verbose), lambda listener: _run(request, listener))


def _refuse_what_is_only_for_here(where: Location, *, verify: bool, extract: str | None, identity: str | None) -> None:
    if identity is not None:
        raise UsageError("--identity needs an image of this host", "gpuckpt pull it first, no key is needed for that")
    if extract is not None:
        raise UsageError("--extract needs an image of this host", "gpuckpt pull it first")
    if verify and not where.path:
        raise UsageError("--verify needs an image", "name it: user@host:/path")


def _show_config(context: typer.Context, manner: Manner) -> int:
    from gpuckpt.cli.configsheet import config_report  # noqa: PLC0415  only what is asked for is loaded
    from gpuckpt.cli.render import present  # noqa: PLC0415

    return present(config_report(context), manner)


def _run(request: InspectRequest, listener: Listener) -> Report:
    from gpuckpt.flows import run  # noqa: PLC0415  --help and TAB must not load the flows

    return run.inspect(request, listener)

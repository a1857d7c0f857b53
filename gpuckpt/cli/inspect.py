"""`gpuckpt inspect`: what an image, a running tree or this host is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from gpuckpt.cli import completing, options
from gpuckpt.cli.manner import SECTIONS, Manner
from gpuckpt.cli.reaching import TO_ASK, Ways, with_ways
from gpuckpt.cli.session import carry_out
from gpuckpt.cli.verb import was_typed
from gpuckpt.model.errors import UsageError
from gpuckpt.model.location import Location

OF_A_TREE, OF_A_HOST = ("files", "sockets", "gpus", "environment"), ("gpus", "environment")
"""The sections of what is no image."""

if TYPE_CHECKING:
    from gpuckpt.cli.session import Listener
    from gpuckpt.model.report import Report
    from gpuckpt.model.requests import InspectRequest


@with_ways(TO_ASK)
def inspect(
    context: typer.Context,
    target: Annotated[
        str | None,
        typer.Argument(
            metavar="TARGET",
            autocompletion=completing.complete_target,
            help="The directory of an image, or of a series of images, also as user@host:/path; user@host: is that "
            "host. Without it and without --tree: this host.",
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
    diff: Annotated[
        str | None,
        typer.Option(
            "--diff",
            metavar="OTHER",
            autocompletion=options.complete_image,
            help="Another image: what differs, and how much of the memory.",
        ),
    ] = None,
    against: Annotated[
        str | None,
        typer.Option(
            "--against",
            metavar="USER@HOST:",
            autocompletion=completing.complete_host,
            help="Another host: could it restore the image? Judged there; status 20 if it could not.",
        ),
    ] = None,
    files: Annotated[bool, typer.Option("--files", help="Show open, mapped and saved files.")] = False,
    sockets: Annotated[bool, typer.Option("--sockets", help="Show sockets, pipes and outside stdio.")] = False,
    memory: Annotated[
        bool, typer.Option("--memory", help="Show what the memory consists of, and how it was compressed.")
    ] = False,
    gpus: Annotated[bool, typer.Option("--gpus", help="Show GPUs and CUDA processes.")] = False,
    environment: Annotated[
        bool,
        typer.Option("--environment", help="Show versions, settings, directories and names of variables."),
    ] = False,
    timings: Annotated[bool, typer.Option("--timings", help="Show how long each phase of the dump took.")] = False,
    everything: Annotated[bool, typer.Option("--all", help="Show everything, and every check that passes.")] = False,
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
    sections = _named(files=files, sockets=sockets, memory=memory, gpus=gpus, environment=environment, timings=timings)
    is_image = target is not None and (where is None or bool(where.path))
    _refuse_sections(sections, image=is_image, tree=tree is not None)
    _refuse_comparisons(diff, against, local_image=is_image and where is None)
    asked = None if against is None else options.location(options.with_colon(against))
    if where is not None:
        # One from a file is meant for images of this host; it says nothing about this one.
        typed = identity if was_typed(context, "identity") else None
        _refuse_what_is_only_for_here(where, verify=verify, extract=extract, identity=typed)
    elif asked is None:
        ways.refuse_here()
    from gpuckpt.model.requests import InspectRequest  # noqa: PLC0415  --help and TAB need no request

    request = InspectRequest(
        target=None if target is None or where is not None else options.absolute(target),
        remote=None if where is None else ways.reach(where),
        pid=tree,
        verify=verify,
        keep_argv=keep_argv,
        extract=None if extract is None else options.absolute(extract),
        memory=memory or everything,
        diff=None if diff is None else options.absolute(diff),
        against=None if asked is None else ways.reach(asked.at("")),
        identity=None if identity is None else options.absolute(identity),
        allowed_signers=None if allowed_signers is None else options.absolute(allowed_signers),
    )
    manner = Manner(as_json, quiet, verbose, sections=sections, everything=everything)
    return carry_out(manner, lambda listener: _run(request, listener), "describe")


def _named(**wanted: bool) -> tuple[str, ...]:
    return tuple(name for name in SECTIONS if wanted[name])


def _refuse_sections(sections: tuple[str, ...], *, image: bool, tree: bool) -> None:
    """What was never dumped has no timings, and a host no processes of a job."""
    known = SECTIONS if image else OF_A_TREE if tree else OF_A_HOST
    kind = "a running tree" if tree else "a host"
    for name in sections:
        if name not in known:
            raise UsageError(f"--{name}: {kind} has none to show", "name an image, or leave it out")


def _refuse_comparisons(diff: str | None, against: str | None, *, local_image: bool) -> None:
    for option, value in (("--diff", diff), ("--against", against)):
        if value is not None and not local_image:
            raise UsageError(f"{option} needs an image of this host", "name its directory")
    if diff is not None and against is not None:
        raise UsageError("--diff and --against are both given", "ask one after the other")


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

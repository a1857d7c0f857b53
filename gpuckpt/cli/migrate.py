"""`gpuckpt migrate`: a process tree to another host."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from gpuckpt.cli import completing, options, readyoptions, restoreoptions
from gpuckpt.cli.asking import Asked, with_tree
from gpuckpt.cli.completing import complete_capture, complete_image
from gpuckpt.cli.manner import Manner
from gpuckpt.cli.reaching import TO_CARRY, Ways, with_ways
from gpuckpt.cli.readyoptions import ReadyCmd, ReadyHttp, ReadyTcp, ReadyTimeout
from gpuckpt.cli.session import carry_out
from gpuckpt.cli.verb import configuration_of
from gpuckpt.model.errors import Refused, UsageError

THERE = "a file on the other host"

if TYPE_CHECKING:
    from gpuckpt.cli.session import Listener
    from gpuckpt.model.report import Report
    from gpuckpt.model.requests import MigrateRequest


@with_tree
@with_ways(TO_CARRY)
def migrate(
    context: typer.Context,
    target: Annotated[
        str,
        typer.Argument(
            metavar="USER@HOST[:DIR]",
            autocompletion=completing.complete_host,
            help="The other host. With DIR the image stays there, in that directory; else it goes when the tree runs.",
        ),
    ],
    *,
    asked: Asked,
    stdin: Annotated[
        str | None, typer.Option("--stdin", metavar="FILE", help=f"The tree's stdin comes from FILE, {THERE}.")
    ] = None,
    stdout: Annotated[
        str | None, typer.Option("--stdout", metavar="FILE", help=f"The tree's stdout goes to FILE, {THERE}.")
    ] = None,
    stderr: Annotated[
        str | None, typer.Option("--stderr", metavar="FILE", help=f"The tree's stderr goes to FILE, {THERE}.")
    ] = None,
    gpu: Annotated[
        list[str] | None,
        typer.Option("--gpu", metavar="OLD=NEW", help="Put what is on GPU OLD here on GPU NEW there. May be repeated."),
    ] = None,
    carry_files: Annotated[
        list[str] | None,
        typer.Option(
            "--carry-files",
            metavar="writable|all|none|GLOB",
            autocompletion=complete_capture,
            help="Files that go along if they are missing there or differ: open ones, and those below working "
            "directories (default: writable, open for writing). May be repeated.",
        ),
    ] = None,
    pre_seed: Annotated[
        bool,
        typer.Option(
            "--pre-seed",
            help="First send an image of the running tree; the tree then stands still only for what has changed since.",
        ),
    ] = False,
    keep_image: Annotated[
        str | None,
        typer.Option(
            "--keep-image",
            metavar="IMAGE",
            autocompletion=complete_image,
            help="Keep the image here too, as this directory. It must not exist.",
        ),
    ] = None,
    pre_restore: Annotated[
        str | None,
        options.hook(
            "pre-restore", "Run this on the other host before the tree comes up there; if it fails, none does."
        ),
    ] = None,
    post_restore: Annotated[
        str | None, options.hook("post-restore", "Run this last on the other host, whatever came of it there.")
    ] = None,
    ready_cmd: ReadyCmd = None,
    ready_http: ReadyHttp = None,
    ready_tcp: ReadyTcp = None,
    ready_timeout: ReadyTimeout = 60.0,
    ways: Ways,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
) -> int:
    """Move a process tree to another host, which needs gpuckpt too.

    The tree stands still here until its copy there runs, and ends here then. Whatever fails before that, it goes
    on here.
    """
    streams = {"--stdin": stdin, "--stdout": stdout, "--stderr": stderr}
    where = options.location(options.with_colon(target))
    if where.path and not where.path.startswith(("/", "~/")):
        raise UsageError(f"{target}: {where.path} is no absolute path", "write user@host:/path, or user@host")
    _refuse_to_keep_in_clear(context, "--keep-image" if keep_image is not None else "DIR" if where.path else "")
    from gpuckpt.model.requests import MigrateRequest  # noqa: PLC0415  --help and TAB need no request

    request = MigrateRequest(
        **asked.as_request(),
        reach=ways.reach(where),
        keep_image=None if keep_image is None else options.absolute(keep_image),
        stdio={
            number: options.far_file(name, path)
            for number, (name, path) in enumerate(streams.items())
            if path is not None
        },
        gpu_map=restoreoptions.gpu_map(gpu),
        pre_seed=pre_seed,
        carry_files=options.captured_files(carry_files) or ("writable",),
        hooks_there=options.hooks(pre_restore, post_restore, asked.hook_timeout),
        readiness=readyoptions.readiness(ready_cmd, ready_http, ready_tcp, ready_timeout, None),
    )
    manner = Manner(as_json, quiet, verbose, asked.dry_run)
    return carry_out(manner, lambda listener: _run(request, listener), "migrating")


def _refuse_to_keep_in_clear(context: typer.Context, kept_by: str) -> None:
    """A migration encrypts nothing, and who has every dump encrypted does not expect it. Raises Refused."""
    wanted = configuration_of(context).commands.get("dump", {}).get("encrypt-to")
    if kept_by and wanted is not None and wanted.value:
        raise Refused(
            f"{kept_by} keeps an image that is not encrypted, against [dump] encrypt-to of {wanted.path}",
            f"leave {kept_by} out; what shall be kept, save with `gpuckpt dump`",
        )


def _run(request: MigrateRequest, listener: Listener) -> Report:
    from gpuckpt.flows import migrating  # noqa: PLC0415  --help and TAB must not load the flows

    return migrating.migrate(request, listener)

"""`gpuckpt restore`: image -> running tree, and the repair of a tree that was left held."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from gpuckpt.cli import completing, options, readyoptions, restoreoptions
from gpuckpt.cli.manner import Manner
from gpuckpt.cli.reaching import TO_CARRY, Ways, with_ways
from gpuckpt.cli.readyoptions import ColdStart, ReadyCmd, ReadyHttp, ReadyTcp, ReadyTimeout
from gpuckpt.cli.session import carry_out
from gpuckpt.cli.verb import was_typed
from gpuckpt.model.errors import UsageError
from gpuckpt.model.location import Location

if TYPE_CHECKING:
    from gpuckpt.cli.session import Listener
    from gpuckpt.model.report import Report
    from gpuckpt.model.requests import RepairRequest, RestoreRequest


@with_ways(TO_CARRY)
def restore(
    context: typer.Context,
    image: Annotated[
        str | None,
        typer.Argument(
            metavar="IMAGE",
            autocompletion=completing.complete_target,
            help="The directory of the image. Of user@host:/path the memory comes over SSH and is stored nowhere here.",
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
            help="Instead of IMAGE: repair a tree that an interrupted run left held.",
        ),
    ] = None,
    wait: Annotated[
        bool, typer.Option("--wait", help="Stay until the tree ends: pass signals on, exit with its status.")
    ] = False,
    stdin: Annotated[
        str | None, typer.Option("--stdin", metavar="FILE", help="The tree's stdin comes from FILE.")
    ] = None,
    stdout: Annotated[
        str | None, typer.Option("--stdout", metavar="FILE", help="The tree's stdout goes to FILE.")
    ] = None,
    stderr: Annotated[
        str | None, typer.Option("--stderr", metavar="FILE", help="The tree's stderr goes to FILE.")
    ] = None,
    tcp: Annotated[
        Literal["keep", "close"] | None,
        typer.Option("--tcp", metavar="keep|close", help="What to do about connections that leave the tree."),
    ] = None,
    gpu: Annotated[
        list[str] | None,
        typer.Option("--gpu", metavar="OLD=NEW", help="Put what was on GPU OLD on GPU NEW. May be repeated."),
    ] = None,
    plain: Annotated[
        bool,
        typer.Option(
            "--plain", help="Let CRIU restore all memory from files, instead of writing it into the tree in parallel."
        ),
    ] = False,
    huge_pages: options.HugePages = False,
    ways: Ways,
    overwrite_files: Annotated[
        bool,
        typer.Option(
            "--overwrite-files",
            help="Where a file differs from the one in the image, move it aside and put the image's there.",
        ),
    ] = False,
    truncate_files: Annotated[
        bool,
        typer.Option(
            "--truncate-files",
            help="Cut files that only grew to the size they had; what came later is kept beside them.",
        ),
    ] = False,
    isolate: Annotated[
        list[str] | None,
        typer.Option(
            "--isolate",
            metavar="pid|net|pid,net",
            autocompletion=completing.complete_isolation,
            help="Pids and a network of the tree's own, where those of this host are taken.",
        ),
    ] = None,
    clone: Annotated[
        bool,
        typer.Option(
            "--clone", help="One of several from this image: its own pids and /dev/shm; no file of others is changed."
        ),
    ] = False,
    netns: Annotated[
        str | None,
        typer.Option(
            "--netns",
            metavar="NAME|new",
            autocompletion=completing.complete_network,
            help="Come up in this network namespace (see ip-netns(8)), or in a new one with nothing but lo.",
        ),
    ] = None,
    port: Annotated[
        list[str] | None,
        typer.Option("--port", metavar="OLD=NEW", help="Bind NEW where the tree was bound to OLD. May be repeated."),
    ] = None,
    identity: options.Identity = None,
    allowed_signers: options.AllowedSigners = None,
    dry_run: options.DryRun = False,
    allow: options.Allow = None,
    timeout: options.Timeout = None,
    settle: options.Settle = 3.0,
    pre_restore: Annotated[
        str | None, options.hook("pre-restore", "Run this first, with /bin/sh -c; if it fails, nothing is touched.")
    ] = None,
    post_restore: Annotated[
        str | None, options.hook("post-restore", "Run this last, whatever came of the restore; it is told what.")
    ] = None,
    hook_timeout: options.HookTimeout = 60.0,
    ready_cmd: ReadyCmd = None,
    ready_http: ReadyHttp = None,
    ready_tcp: ReadyTcp = None,
    ready_timeout: ReadyTimeout = 60.0,
    cold_start_seconds: ColdStart = None,
    metrics_file: options.MetricsFile = None,
    force_program: options.ForceProgram = False,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
) -> int:
    """Bring the tree of an image back, or repair a tree that was left held.

    Every byte of the image is verified before the first instruction of the tree runs.
    """
    if (image is None) == (tree is None):
        raise UsageError("restore takes an IMAGE or --tree PID, and one of them only", "gpuckpt restore --help")
    stdio = {number: path for number, path in enumerate((stdin, stdout, stderr)) if path is not None}
    from gpuckpt.model.requests import RepairRequest, RestoreRequest  # noqa: PLC0415  --help and TAB need no request

    request: RestoreRequest | RepairRequest
    if tree is not None:
        if any((isolate, clone, netns, port)):
            raise UsageError("--tree repairs a tree where it is; it gets no namespaces and no ports")
        of_an_image = (wait, stdio, tcp, gpu, allow, plain, huge_pages, overwrite_files, truncate_files, metrics_file)
        if any((*of_an_image, pre_restore, post_restore, ready_cmd, ready_http, ready_tcp, cold_start_seconds)):
            raise UsageError("--tree repairs a tree that is here; the options of an image make no sense with it")
        ways.refuse_here()
        request = RepairRequest(pid=tree, timeout_seconds=timeout, dry_run=dry_run, force_program=force_program)
    else:
        if clone and (overwrite_files or truncate_files):
            raise UsageError(
                "--clone changes no files that others may use", "leave --overwrite-files and --truncate-files out"
            )
        where = options.elsewhere(image or "")
        request = RestoreRequest(
            image=_place(image or "", where, ways),
            reach=None if where is None else ways.reach(where.at(where.path.rstrip("/"))),
            wait=wait,
            stdio={number: restoreoptions.stream_file(path) for number, path in stdio.items()},
            tcp=tcp,
            gpu_map=restoreoptions.gpu_map(gpu),
            dry_run=dry_run,
            allow=options.check_ids(allow),
            timeout_seconds=timeout,
            settle_seconds=settle,
            force_program=force_program,
            plain=plain,
            huge_pages=huge_pages,
            overwrite_files=overwrite_files,
            truncate_files=truncate_files,
            hooks=options.hooks(pre_restore, post_restore, hook_timeout),
            readiness=readyoptions.readiness(ready_cmd, ready_http, ready_tcp, ready_timeout, cold_start_seconds),
            metrics_file=None if metrics_file is None else options.absolute(metrics_file),
            isolate=restoreoptions.isolation(isolate),
            netns=restoreoptions.network(netns),
            ports=restoreoptions.ports(port),
            clone=clone,
            identity=None if identity is None else options.absolute(identity),
            identity_at_hand=identity is not None and not was_typed(context, "identity"),
            allowed_signers=None if allowed_signers is None else options.absolute(allowed_signers),
        )
    manner = Manner(as_json, quiet, verbose, dry_run, shares_terminal=wait)
    flow = "restore" if tree is None else "repair"
    return carry_out(manner, lambda listener: _run(request, listener), flow, looks_at_gpus=tree is None)


def _place(image: str, where: Location | None, ways: Ways) -> Path:
    """Its path, on whichever host. Raises UsageError."""
    if where is None:
        ways.refuse_here()
        return options.absolute(image)
    if not where.path.strip("/"):
        raise UsageError(f"{image}: no image is named", "write user@host:/path/of/the/image")
    return Path(where.path)


def _run(request: RestoreRequest | RepairRequest, listener: Listener) -> Report:
    from gpuckpt.flows import run  # noqa: PLC0415  --help and TAB must not load the flows
    from gpuckpt.model.requests import RepairRequest  # noqa: PLC0415

    if isinstance(request, RepairRequest):
        return run.repair(request, listener)
    return run.restore(request, listener)

"""`gpuckpt dump`: process tree -> image."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from gpuckpt.cli import options
from gpuckpt.cli.completing import complete_capture, complete_image
from gpuckpt.cli.manner import Manner
from gpuckpt.cli.session import Listener, carry_out
from gpuckpt.model.report import Report
from gpuckpt.model.requests import DumpRequest


def dump(
    image: options.Image,
    *,
    tree: options.Tree,
    leave_running: Annotated[bool, typer.Option("--leave-running", help="Keep the tree going afterwards.")] = False,
    tcp: Annotated[
        Literal["refuse", "keep", "close"],
        typer.Option("--tcp", metavar="refuse|keep|close", help="What to do about connections that leave the tree."),
    ] = "refuse",
    huge_pages: options.HugePages = False,
    dry_run: options.DryRun = False,
    allow: options.Allow = None,
    keep_argv: options.KeepArgv = False,
    timeout: options.Timeout = None,
    lock_timeout: Annotated[
        float,
        typer.Option(
            "--lock-timeout",
            metavar="SECONDS",
            parser=options.seconds,
            help="The longest wait for the GPU work a process has begun.",
        ),
    ] = 60.0,
    settle: options.Settle = 3.0,
    base: Annotated[
        str | None,
        typer.Option(
            "--base",
            metavar="IMAGE",
            autocompletion=complete_image,
            help="An older image: memory that it holds already is shared with it, not written again.",
        ),
    ] = None,
    capture_files: Annotated[
        list[str] | None,
        typer.Option(
            "--capture-files",
            metavar="writable|all|none|GLOB",
            autocompletion=complete_capture,
            help="Open files to save into the image (default: writable with --leave-running). May be repeated.",
        ),
    ] = None,
    level: Annotated[
        str,
        typer.Option(
            "--level", metavar="LEVEL", parser=options.level, help="How hard to compress: -5 (fast) to 19, or none."
        ),
    ] = "-1",
    workers: Annotated[
        int | None,
        typer.Option(
            "--workers", metavar="N", parser=options.count, help="Threads that compress (default: one for each core)."
        ),
    ] = None,
    plain: Annotated[
        bool, typer.Option("--plain", help="Let CRIU write the image itself: slower, and not compressed.")
    ] = False,
    pre_dump: Annotated[
        str | None, options.hook("pre-dump", "Run this first, with /bin/sh -c; if it fails, nothing is touched.")
    ] = None,
    post_dump: Annotated[
        str | None, options.hook("post-dump", "Run this last, whatever came of the dump; it is told what.")
    ] = None,
    hook_timeout: options.HookTimeout = 60.0,
    force_program: options.ForceProgram = False,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
) -> int:
    """Save a process tree as an image.

    The tree ends when the image is complete and safe on disk, as with `criu dump`; --leave-running keeps
    it going. If anything fails before that, the tree runs on.
    """
    request = DumpRequest(
        pid=tree,
        image=options.absolute(image),
        leave_running=leave_running,
        tcp=tcp,
        dry_run=dry_run,
        allow=options.check_ids(allow),
        keep_argv=keep_argv,
        timeout_seconds=timeout,
        lock_timeout_seconds=lock_timeout,
        settle_seconds=settle,
        force_program=force_program,
        plain=plain,
        huge_pages=huge_pages,
        level=None if level == "none" else int(level),
        workers=workers,
        base=options.absolute(base) if base is not None else None,
        capture_files=options.captured_files(capture_files),
        hooks=options.hooks(pre_dump, post_dump, hook_timeout),
    )
    return carry_out(Manner(as_json, quiet, verbose, dry_run), lambda listener: _run(request, listener))


def _run(request: DumpRequest, listener: Listener) -> Report:
    from gpuckpt.flows import run  # noqa: PLC0415  --help and TAB must not load the flows

    return run.dump(request, listener)

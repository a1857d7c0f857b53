"""`gpuckpt dump`: process tree -> image."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from gpuckpt.cli import options, seriesoptions
from gpuckpt.cli.asking import Asked, require_one, with_tree
from gpuckpt.cli.completing import complete_capture, complete_image
from gpuckpt.cli.manner import Manner
from gpuckpt.cli.session import carry_out
from gpuckpt.model.errors import UsageError
from gpuckpt.model.series import FULL_EVERY_SECONDS, Rules

if TYPE_CHECKING:
    from gpuckpt.cli.session import Listener
    from gpuckpt.model.report import Report
    from gpuckpt.model.requests import DumpRequest, Into, Reach


@with_tree
def dump(
    image: options.Image = None,
    *,
    asked: Asked,
    leave_running: Annotated[bool, typer.Option("--leave-running", help="Keep the tree going afterwards.")] = False,
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
    encrypt_to: Annotated[
        list[str] | None,
        typer.Option(
            "--encrypt-to",
            metavar="RECIPIENT",
            help="Encrypt the image to an age or ssh-ed25519 public key, or those in a file. May be repeated.",
        ),
    ] = None,
    identity: Annotated[
        str | None,
        typer.Option("--identity", metavar="FILE", help="What opens an encrypted --base: as for `gpuckpt restore`."),
    ] = None,
    sign_key: Annotated[
        str | None,
        typer.Option(
            "--sign-key",
            metavar="FILE",
            help="Sign the image with this OpenSSH key: a private one, or a public one whose other half an agent has.",
        ),
    ] = None,
    plain: Annotated[
        bool, typer.Option("--plain", help="Let CRIU write the image itself: slower, and not compressed.")
    ] = False,
    into: Annotated[
        str | None,
        typer.Option(
            "--into",
            metavar="DIR",
            autocompletion=complete_image,
            help="Instead of IMAGE: the next image of a series, DIR/NAME-TIME; DIR/latest is a link to the newest.",
        ),
    ] = None,
    name: Annotated[
        str | None,
        typer.Option(
            "--name",
            metavar="NAME",
            parser=seriesoptions.series_name,
            help="With --into: the name of the series. Without it: the program's name (encrypted: job) and its pid.",
        ),
    ] = None,
    keep: Annotated[
        int | None,
        typer.Option(
            "--keep",
            metavar="N",
            parser=seriesoptions.number,
            help="With --into: the newest N images of the series stay.",
        ),
    ] = None,
    keep_within: Annotated[
        float | None,
        typer.Option(
            "--keep-within",
            metavar="SPAN",
            parser=seriesoptions.span,
            help="With --into: images younger than SPAN (30m, 24h, 7d) stay, beside those of --keep.",
        ),
    ] = None,
    min_free: Annotated[
        str | None,
        typer.Option(
            "--min-free",
            metavar="ROOM",
            parser=seriesoptions.room,
            help="With --into: then the oldest go until ROOM (10%, 20G) is free on the disk; the newest never goes.",
        ),
    ] = None,
    no_base: Annotated[
        bool, typer.Option("--no-base", help="With --into: share nothing with the newest image of the series.")
    ] = False,
    full_every: Annotated[
        float | None,
        typer.Option(
            "--full-every",
            metavar="SPAN",
            parser=seriesoptions.span,
            help="With --into: how old the last image that shares nothing may be (without it: 7d).",
        ),
    ] = None,
    push: Annotated[
        str | None,
        typer.Option(
            "--push",
            metavar="USER@HOST:DIR",
            help="With --into: copy each image there; older ones go there by the same rules, where gpuckpt is.",
        ),
    ] = None,
    remote_command: options.RemoteCommand = None,
    ssh_config: options.SshConfig = None,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
) -> int:
    """Save a process tree as an image.

    The tree ends when the image is complete and safe on disk, as with `criu dump`; --leave-running keeps
    it going. If anything fails before that, the tree runs on.
    """
    series = _series(
        into,
        name=name,
        keep=keep,
        keep_within=keep_within,
        min_free=min_free,
        no_base=no_base,
        full_every=full_every,
        push=_reach(push, ssh_config, remote_command),
    )
    require_one("where the image goes", {"IMAGE": image, "--into": into})
    if series is not None and base is not None:
        raise UsageError("--base and --into are both given", "a series takes its newest image; leave --base out")
    if plain and encrypt_to:
        raise UsageError(
            "--plain and --encrypt-to exclude each other: CRIU would write the memory to the disk as it is",
            "leave one of them out",
        )
    from gpuckpt.model.requests import DumpRequest  # noqa: PLC0415  --help and TAB need no request

    request = DumpRequest(
        **asked.as_request(),
        image=options.absolute(image) if series is None else series.directory,
        leave_running=leave_running,
        plain=plain,
        base=options.absolute(base) if base is not None else None,
        capture_files=options.captured_files(capture_files),
        into=series,
        encrypt_to=tuple(encrypt_to or ()),
        identity=None if identity is None else options.absolute(identity),
        sign_key=None if sign_key is None else options.absolute(sign_key),
    )
    manner = Manner(as_json, quiet, verbose, asked.dry_run, one_line=series is not None)
    return carry_out(manner, lambda listener: _run(request, listener), "dump", looks_at_gpus=True)


def _series(  # the options that only a series has
    into: str | None,
    *,
    name: str | None,
    keep: int | None,
    keep_within: float | None,
    min_free: str | None,
    no_base: bool,
    full_every: float | None,
    push: Reach | None,
) -> Into | None:
    if into is None:
        given = (name, keep, keep_within, min_free, no_base or None, full_every, push)
        words = ("--name", "--keep", "--keep-within", "--min-free", "--no-base", "--full-every", "--push")
        alone = next((word for word, value in zip(words, given, strict=True) if value is not None), None)
        if alone is not None:
            raise UsageError(f"{alone} is for a series of images", "name its directory: --into DIR")
        return None
    from gpuckpt.model.requests import Into  # noqa: PLC0415

    return Into(
        options.absolute(into),
        name,
        Rules(keep, keep_within, seriesoptions.min_free(min_free)),
        use_base=not no_base,
        full_every_seconds=FULL_EVERY_SECONDS if full_every is None else full_every,
        push=push,
    )


def _reach(push: str | None, ssh_config: str | None, remote_command: str | None) -> Reach | None:
    if push is not None:
        return options.reach(options.location(push), ssh_config, remote_command)
    if ssh_config is not None or remote_command is not None:
        raise UsageError("--remote-command and --ssh-config are for another host", "name it: --push user@host:DIR")
    return None


def _run(request: DumpRequest, listener: Listener) -> Report:
    from gpuckpt.flows import run  # noqa: PLC0415  --help and TAB must not load the flows

    return run.dump(request, listener)

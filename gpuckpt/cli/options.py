"""The options that several commands share, and the words that turn their texts into values."""

from __future__ import annotations

import math
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gpuckpt.cli.completing import CAPTURE_WORDS, complete_image, complete_pid
from gpuckpt.cli.manner import is_terminal
from gpuckpt.model.errors import NotFound, UsageError
from gpuckpt.model.location import Location
from gpuckpt.model.location import parse as parse_location

if TYPE_CHECKING:
    from gpuckpt.model.requests import Hooks, Reach

Json = Annotated[
    bool, typer.Option("--json", help="Print one JSON object on stdout, and events as JSON lines on stderr.")
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Say nothing but errors.")]
Verbose = Annotated[
    bool, typer.Option("--verbose", "-v", help="Say each step, and say success without a terminal too.")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show the plan and every check, and touch nothing.")]
KeepArgv = Annotated[
    bool,
    typer.Option("--keep-argv", help="Keep the values of arguments that look like keys, tokens or passwords."),
]
Allow = Annotated[
    list[str] | None,
    typer.Option("--allow", metavar="ID[,ID]", help="Go on although these checks fail. May be repeated."),
]
ForceProgram = Annotated[
    bool,
    typer.Option("--use-cuda-program", hidden=True, help="Use the cuda-checkpoint program instead of the driver."),
]


HugePages = Annotated[
    bool,
    typer.Option(
        "--huge-pages",
        help="Set the host to transparent huge pages while GPU memory is copied: faster. Put back afterwards.",
    ),
]


def seconds(text: str) -> float:
    """A number of seconds: finite and not negative."""
    try:
        value = float(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a number of seconds.") from None
    if not math.isfinite(value) or value < 0:
        raise typer.BadParameter(f"{text!r} is not a number of seconds from 0 on.")
    return value


def limit(text: str) -> float:
    """A number of seconds in which something can be done."""
    value = seconds(text)
    if value == 0:
        raise typer.BadParameter("0 seconds are too short for anything; leave it out for no limit.")
    return value


def pid(text: str) -> int:
    """A process id."""
    if not (text.isascii() and text.isdigit() and 0 < int(text) < 1 << 31):
        raise typer.BadParameter(f"{text!r} is no process id.")
    return int(text)


def level(text: str) -> str:
    """A level of compression, as it is written: 'none', or a number of zstd's."""
    try:
        known = text == "none" or -5 <= int(text) <= 19
    except ValueError:
        known = False
    if not known:
        raise typer.BadParameter(f"{text!r} is neither none nor a number from -5 to 19.")
    return text


def count(text: str) -> int:
    """A number of threads."""
    if not (text.isascii() and text.isdigit() and 0 < int(text) <= 256):
        raise typer.BadParameter(f"{text!r} is not a number from 1 to 256.")
    return int(text)


def unit(text: str) -> str:
    """The name of a systemd unit."""
    if re.fullmatch(r"[\w@:.\\][\w@:.\\-]{0,255}", text, re.ASCII) is None:
        raise typer.BadParameter(f"{text!r} is no name of a systemd unit.")
    return text


def rate(text: str) -> float:
    """Bytes per second: a number, and K, M or G for the next powers of 1024."""
    match = re.fullmatch(r"([0-9]{1,12}(?:\.[0-9]{1,6})?)([KMG]?)", text.upper().removesuffix("IB").removesuffix("/S"))
    value = float(match[1]) * 1024.0 ** ("KMG".find(match[2]) + 1 if match[2] else 0) if match else 0.0
    if value < 1024:
        raise typer.BadParameter(f"{text!r} is no rate from 1K on, such as 50M (MiB per second).")
    return value


Connections = Annotated[
    int | None,
    typer.Option(
        "--connections",
        metavar="K",
        parser=count,
        help="SSH connections that carry data at once (default: by cores, latency and size).",
    ),
]
BandwidthLimit = Annotated[
    float | None,
    typer.Option("--bwlimit", metavar="RATE", parser=rate, help="At most so many bytes per second: 500K, 50M, 1G."),
]
RemoteCommand = Annotated[
    str | None,
    typer.Option(
        "--remote-command",
        metavar="COMMAND",
        help=(
            "How gpuckpt is started there, for example 'sudo -n gpuckpt'. By default as gpuckpt. "
            "'internal-sftp' for a host that offers SFTP and nothing else: then nothing else is tried."
        ),
    ),
]
SshConfig = Annotated[
    str | None,
    typer.Option("--ssh-config", "-F", metavar="FILE", help="A configuration for ssh instead of the user's own."),
]
VerifyOnly = Annotated[
    bool,
    typer.Option("--verify-only", help="Copy nothing: have every byte of the image on the other host checked there."),
]


HookTimeout = Annotated[
    float,
    typer.Option(
        "--hook-timeout",
        metavar="SECONDS",
        parser=limit,
        help="The longest that the command before, and the one after, may take; then it is ended.",
    ),
]


def hook(when: str, text: str) -> Any:
    """The option for a command of the user's own."""
    return typer.Option(f"--{when}", metavar="COMMAND", help=text)


def hooks(before: str | None, after: str | None, timeout_seconds: float) -> Hooks:
    """The user's own commands; an empty one is none, so that the command line can take back what a file says."""
    from gpuckpt.model.requests import Hooks  # noqa: PLC0415

    return Hooks(before=command_line(before), after=command_line(after), timeout_seconds=timeout_seconds)


def command_line(text: str | None) -> str | None:
    """A command of the user's own; an empty one is none."""
    if text is not None and "\0" in text:
        raise UsageError("a command holds a NUL character", "no program can be started with one")
    return text if text and text.strip() else None


def location(text: str) -> Location:
    """Another host and a path there."""
    found = parse_location(text)
    if found is None:
        raise UsageError(f"{text} names no place on another host", "write user@host:/path")
    return found


def with_colon(text: str) -> str:
    """USER@HOST where only a host can be meant, as a place on it."""
    return text if ":" in text else f"{text}:"


def elsewhere(text: str) -> Location | None:
    """The host and path that a text names; None for what is here, a name with a colon in it included."""
    return None if os.path.lexists(text) else parse_location(text)


def reach(
    where: Location,
    ssh_config: str | None,
    remote_command: str | None,
    *,
    connections: int | None = None,
    bytes_per_second: float | None = None,
) -> Reach:
    """How another host is reached; ssh may ask for a passphrase where a person sits."""
    if remote_command is not None and not remote_command.strip():
        raise UsageError("--remote-command is empty", "name the command that starts gpuckpt there")
    from gpuckpt.model.requests import Reach  # noqa: PLC0415  --help and TAB need no request

    return Reach(
        location=where,
        ssh_config=None if ssh_config is None else absolute(ssh_config),
        remote_command=remote_command,
        may_ask=is_terminal(sys.stdin),
        connections=connections,
        bytes_per_second=bytes_per_second,
    )


Identity = Annotated[
    str | None,
    typer.Option(
        "--identity",
        metavar="FILE",
        help="What opens an encrypted image: an age identity, or an SSH private key without a passphrase.",
    ),
]
AllowedSigners = Annotated[
    str | None,
    typer.Option(
        "--allowed-signers",
        metavar="FILE",
        help="Take only an image that one of these has signed (OpenSSH's allowed_signers, see ssh-keygen(1)).",
    ),
]
Timeout = Annotated[
    float | None,
    typer.Option(
        "--timeout",
        metavar="SECONDS",
        parser=limit,
        help="One limit for the whole operation; when it is over, all is undone.",
    ),
]
LockTimeout = Annotated[
    float,
    typer.Option(
        "--lock-timeout",
        metavar="SECONDS",
        parser=seconds,
        help="The longest wait for the GPU work a process has begun.",
    ),
]
Level = Annotated[
    str,
    typer.Option(
        "--level",
        metavar="LEVEL",
        parser=level,
        help="How hard to compress: -5 (fast) to 19, or none. Below 0 a sample decides whether to.",
    ),
]
Workers = Annotated[
    int | None,
    typer.Option("--workers", metavar="N", parser=count, help="Threads that compress (default: one for each core)."),
]
Settle = Annotated[
    float,
    typer.Option(
        "--settle",
        metavar="SECONDS",
        parser=seconds,
        help="Before success is said, watch the tree that runs again for so long: its first process must not end.",
    ),
]
Tree = Annotated[
    int | None,
    typer.Option(
        "--tree",
        metavar="PID",
        parser=pid,
        autocompletion=complete_pid,
        help="The process at the root of the tree.",
    ),
]
PidFile = Annotated[
    str | None,
    typer.Option(
        "--pid-file",
        metavar="FILE",
        help="Instead of --tree: the pid stands in FILE, which must not be older than the process.",
    ),
]
Unit = Annotated[
    str | None,
    typer.Option(
        "--unit", metavar="NAME", parser=unit, help="Instead of --tree: the main process of this systemd unit."
    ),
]
MetricsFile = Annotated[
    str | None,
    typer.Option(
        "--metrics-file",
        metavar="FILE",
        help="Write figures of this run for Prometheus: FILE in the directory of node_exporter's textfile collector.",
    ),
]
Image = Annotated[
    str | None,
    typer.Argument(
        metavar="IMAGE", autocompletion=complete_image, help="The directory that becomes the image. It must not exist."
    ),
]


def absolute(text: str | None) -> Path:
    """The absolute path behind an argument, links resolved this once. Bytes survive as surrogates."""
    if not text:
        raise UsageError("a path is empty", "name a directory")
    try:
        return Path(os.path.realpath(text))
    except FileNotFoundError:
        raise NotFound(f"{text}: the current directory does not exist any more", "use an absolute path") from None


def captured_files(values: list[str] | None) -> tuple[str, ...]:
    """What --capture-files names: paths become absolute, links resolved; patterns become absolute."""
    words = values or []
    for word in words:
        if not word:
            raise UsageError("--capture-files '': nothing is named", "say writable, all, none, or a path or pattern")
    if "none" in words and set(words) != {"none"}:
        raise UsageError("--capture-files none goes with no other", "leave one of them out")
    return tuple(word if word in CAPTURE_WORDS else _file_word(word) for word in words)


def _file_word(word: str) -> str:
    return os.path.abspath(word) if any(sign in word for sign in "*?[") else str(absolute(word))  # noqa: PTH100


def far_file(option: str, text: str) -> str:
    """A path on another host, where nobody is in a directory."""
    if not text.startswith("/") or "\0" in text:
        raise UsageError(f"{option} {text}: no absolute path", "name a file of the other host, as /var/log/job.log")
    return os.path.normpath(text)


def check_ids(values: list[str] | None) -> frozenset[str]:
    """The ids of --allow. A name that is no check's, or of a check that nothing can open, is refused."""
    for value in values or ():
        if not value.strip(" ,"):
            raise UsageError(f"--allow {value!r}: no check is named", "name one, as --dry-run shows them")
    ids = frozenset(item.strip() for value in values or () for item in value.split(",") if item.strip())
    if ids:
        from gpuckpt.checks import allow_error  # noqa: PLC0415  only --allow needs the lists

        error = allow_error(ids)
        if error is not None:
            raise error
    return ids

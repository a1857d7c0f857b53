"""What a restored tree gets here instead of what it had: its streams, namespaces, ports and GPUs, as values."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Literal

from gpuckpt.cli.options import absolute
from gpuckpt.model.errors import UsageError


def stream_file(text: str) -> Path:
    """The path for a restored process's stdin, stdout or stderr.

    /dev/stdout means *this* process's stdout, and another process will open it; behind a pipe there is
    no path but the link in /proc, which is therefore kept.
    """
    resolved = absolute(text)
    path = Path(os.path.abspath(text))  # noqa: PTH100  the links must stay
    if resolved.exists() or not path.exists():
        return resolved
    link = Path(os.readlink(path)) if path.is_symlink() else path  # noqa: PTH115  one step, as it is written
    path = link if link.is_absolute() else path
    return Path(os.path.realpath(path.parent)) / path.name


def isolation(values: list[str] | None) -> frozenset[Literal["pid", "net"]]:
    """The namespaces of --isolate."""
    words = [word.strip() for value in values or () for word in value.split(",")]
    found: set[Literal["pid", "net"]] = set()
    for word in words:
        if word == "pid":
            found.add("pid")
        elif word == "net":
            found.add("net")
        else:
            raise UsageError(f"--isolate {word!r}: there is no such namespace", "say pid, net, or pid,net")
    return frozenset(found)


def network(name: str | None) -> str | None:
    """The name of a network namespace, as `ip netns` takes it."""
    if name is not None and (not name or "/" in name or name in (".", "..") or "\0" in name):
        raise UsageError(f"--netns {name!r}: this is no name", "say new, or a name that `ip netns list` shows")
    return name


def ports(values: list[str] | None) -> dict[int, int]:
    """OLD=NEW pairs of port numbers; each stands once on either side."""
    pairs: dict[int, int] = {}
    for value in values or ():
        numbers = [int(word) for word in value.split("=") if re.fullmatch(r"[0-9]{1,5}", word)]
        if value.count("=") != 1 or len(numbers) != 2 or not all(0 < number < 1 << 16 for number in numbers):
            raise UsageError(
                f"--port {value}: not of the form OLD=NEW, numbers from 1 to 65535", "say --port 8000=8001"
            )
        old, new = numbers
        if old in pairs or new in pairs.values():
            raise UsageError(f"--port {value}: {old if old in pairs else new} is named twice", "name each port once")
        pairs[old] = new
    return pairs


def gpu_map(values: list[str] | None) -> dict[str, str]:
    """OLD=NEW pairs; a GPU named twice on either side makes no sense."""
    pairs: dict[str, str] = {}
    for value in values or ():
        old, equals, new = (item.strip() for item in value.partition("="))
        if not (old and equals and new):
            raise UsageError(f"--gpu {value}: not of the form OLD=NEW", "for example --gpu 0=1")
        if old in pairs or new in pairs.values():
            raise UsageError(f"--gpu {value}: {old if old in pairs else new} is named twice", "name each GPU once")
        pairs[old] = new
    return pairs

"""What TAB offers: pids with their names, directories that may be images, hosts that ssh knows."""

from __future__ import annotations

import os
from pathlib import Path

from gpuckpt.cli.words import safe

CAPTURE_WORDS = ("writable", "all", "none")
"""What --capture-files knows beside paths and patterns."""

MANY = 200
"""More proposals than this help nobody."""


def complete_pid(incomplete: str) -> list[tuple[str, str]]:
    """Processes with their names; kernel threads, init and this process are no jobs."""
    from gpuckpt.system.pidnames import named_pids  # noqa: PLC0415  only TAB needs it

    found = [(pid, comm) for pid, comm in named_pids(incomplete) if pid not in (1, os.getpid())]
    return [(str(pid), safe(comm)) for pid, comm in found[-MANY:]]


def complete_image(incomplete: str) -> list[str]:
    """Directories that begin like this; an image is offered whole, another directory to go on into."""
    parent, _, start = incomplete.rpartition("/")
    above = Path(f"{parent}/" if "/" in incomplete else ".").expanduser()
    prefix = f"{parent}/" if "/" in incomplete else ""
    return [prefix + name for name in _directories(above) if name.startswith(start)][:MANY]


def complete_host(incomplete: str) -> list[str]:
    """Hosts by name, with the user that is typed already. Behind the colon nothing: nobody is asked at TAB."""
    if ":" in incomplete or "/" in incomplete:
        return []
    from gpuckpt.cli.sshnames import ssh_hosts  # noqa: PLC0415  only TAB needs it

    user, at, start = incomplete.rpartition("@")
    return [f"{user}{at}{name}:" for name in ssh_hosts(Path.home()) if name.startswith(start)][:MANY]


def complete_target(incomplete: str) -> list[str]:
    """An image here or a host; hosts only once a name is begun, for there can be many."""
    return complete_image(incomplete) + (complete_host(incomplete) if incomplete else [])


def complete_capture(incomplete: str) -> list[str]:
    """The words of --capture-files; a path is the shell's affair."""
    return [word for word in CAPTURE_WORDS if word.startswith(incomplete)]


def complete_isolation(incomplete: str) -> list[str]:
    """What --isolate takes."""
    return [words for words in ("pid", "net", "pid,net") if words.startswith(incomplete)]


def complete_network(incomplete: str) -> list[str]:
    """`new`, and the network namespaces that have a name."""
    from gpuckpt.system.namespaces import networks  # noqa: PLC0415  only TAB needs it

    return [name for name in ("new", *networks()) if name.startswith(incomplete)]


def _directories(above: Path) -> list[str]:
    try:
        with os.scandir(above) as entries:
            names = sorted(entry.name for entry in entries if entry.is_dir())
    except OSError:
        return []
    return [name if (above / name / "manifest.json").is_file() else f"{name}/" for name in names]

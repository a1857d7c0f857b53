"""What TAB offers: pids with their names, directories that may be images."""

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
    from gpuckpt.system.procfs.reading import all_pids, stat_of  # noqa: PLC0415  only TAB needs it

    found = (stat_of(pid) for pid in all_pids() if str(pid).startswith(incomplete) and pid not in (1, os.getpid()))
    jobs = [(str(stat.pid), safe(stat.comm)) for stat in found if stat is not None and not stat.kernel_thread]
    return jobs[-MANY:]


def complete_image(incomplete: str) -> list[str]:
    """Directories that begin like this; an image is offered whole, another directory to go on into."""
    parent, _, start = incomplete.rpartition("/")
    above = Path(f"{parent}/" if "/" in incomplete else ".").expanduser()
    prefix = f"{parent}/" if "/" in incomplete else ""
    return [prefix + name for name in _directories(above) if name.startswith(start)][:MANY]


def complete_capture(incomplete: str) -> list[str]:
    """The words of --capture-files; a path is the shell's affair."""
    return [word for word in CAPTURE_WORDS if word.startswith(incomplete)]


def _directories(above: Path) -> list[str]:
    try:
        with os.scandir(above) as entries:
            names = sorted(entry.name for entry in entries if entry.is_dir())
    except OSError:
        return []
    return [name if (above / name / "manifest.json").is_file() else f"{name}/" for name in names]

"""What TAB offers: pids with their names, directories that may be images."""

from __future__ import annotations

import os
from pathlib import Path

MANY = 200
"""More proposals than this help nobody."""


def complete_pid(incomplete: str) -> list[tuple[str, str]]:
    """Processes that have a program file (kernel threads have none), with their names."""
    from gpuckpt.system import procfs  # noqa: PLC0415  only TAB needs it

    list_names = getattr(procfs, "process_names", None)
    if list_names is None:
        return []
    own = os.getpid()
    named = ((str(pid), str(name)) for pid, name in list_names() if pid not in (1, own))
    return [(pid, name) for pid, name in named if pid.startswith(incomplete)][:MANY]


def complete_image(incomplete: str) -> list[str]:
    """Directories that begin like this; an image is offered whole, another directory to go on into."""
    parent, _, start = incomplete.rpartition("/")
    above = Path(f"{parent}/" if "/" in incomplete else ".").expanduser()
    prefix = f"{parent}/" if "/" in incomplete else ""
    return [prefix + name for name in _directories(above) if name.startswith(start)][:MANY]


def _directories(above: Path) -> list[str]:
    try:
        with os.scandir(above) as entries:
            names = sorted(entry.name for entry in entries if entry.is_dir())
    except OSError:
        return []
    return [name if (above / name / "manifest.json").is_file() else f"{name}/" for name in names]

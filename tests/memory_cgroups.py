"""Cgroups of a test that limit memory, version 1 or 2."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from tests import harness


def place() -> tuple[Path, str] | None:
    """Where a memory cgroup can be made, and the name of its limit; None where none can be."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        number, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            return Path("/sys/fs/cgroup/memory") / path.lstrip("/"), "memory.limit_in_bytes"
        with contextlib.suppress(OSError):
            if number == "0" and "memory" in Path("/sys/fs/cgroup/cgroup.subtree_control").read_text().split():
                return Path("/sys/fs/cgroup"), "memory.max"
    return None


@contextlib.contextmanager
def limited(size: int):
    """The directory of a new cgroup that may have `size` bytes, page cache included; None where none can be made."""
    found = place()
    made = found[0] / f"gpuckpt-test-{os.getpid()}" if found else None
    try:
        if made is not None:
            made.mkdir()
            (made / found[1]).write_text(str(size))
    except OSError:
        made = None
    yield made
    if made is not None:
        harness.wait_for(lambda: not (made / "cgroup.procs").read_text(), "the cgroup is empty")
        made.rmdir()

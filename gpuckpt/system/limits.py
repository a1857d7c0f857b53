"""What this process itself may have, as far as an operator's `ulimit` is too low for it."""

from __future__ import annotations

import contextlib
import resource

from gpuckpt.model.errors import MachineLacks

DESCRIPTORS = 256
"""A dump with 16 workers has some 80 open, a restore one more for each pack."""


def require_descriptors() -> None:
    """Raise the soft limit of open files to the hard one. Raises MachineLacks where that is too low."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard in (soft, resource.RLIM_INFINITY) and soft >= DESCRIPTORS:
        return
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        soft = hard
    if soft < DESCRIPTORS:
        raise MachineLacks(f"only {soft} open files are allowed here", f"allow {DESCRIPTORS}: ulimit -n {DESCRIPTORS}")

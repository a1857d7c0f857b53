"""What this process itself may have, as far as an operator's `ulimit` is too low for it."""

from __future__ import annotations

import contextlib
import resource

from gpuckpt.model.errors import MachineLacks

DESCRIPTORS = 256
"""A dump with 16 workers has some 80 open, a restore one more for each pack and each process that it fills."""

PLENTY = 1 << 16
"""For images with the packs of many bases. A hard limit may be infinite, which the kernel takes from nobody."""


def require_descriptors() -> None:
    """Raise the soft limit of open files as far as the hard one allows. Raises MachineLacks where that is too low."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = PLENTY if hard == resource.RLIM_INFINITY else min(hard, PLENTY)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            soft = wanted
    if soft != resource.RLIM_INFINITY and soft < DESCRIPTORS:
        raise MachineLacks(f"only {soft} open files are allowed here", f"allow {DESCRIPTORS}: ulimit -n {DESCRIPTORS}")

"""File leases (fcntl(2), F_SETLEASE): nobody else has a file open, and who opens it meanwhile waits."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import signal
from collections.abc import Callable, Iterator

NOT_POSSIBLE = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EACCES, errno.EPERM)
"""File systems without leases; another's file without CAP_LEASE."""

IN_USE = "somebody has it open"


@contextlib.contextmanager
def alone_with(descriptor: int, path: str) -> Iterator[Callable[[], None]]:
    """Nobody else has this open file open; where the descriptor only reads, others may read it as well.

    Yields a function that raises OSError (EBUSY) where somebody waits for the file by now: the kernel lets him in after
    fs.lease-break-time, 45 seconds. Raises OSError (EBUSY) where somebody has it open already. Where a lease is not
    possible nothing is known, and nobody is kept out.
    """
    kind = fcntl.F_RDLCK if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY else fcntl.F_WRLCK
    # By default it is SIGIO that says that somebody waits, and that would end us. SIGURG does nothing to anybody.
    fcntl.fcntl(descriptor, fcntl.F_SETSIG, signal.SIGURG)
    leased = _lease(descriptor, kind, path)

    def require_alone() -> None:
        if leased and fcntl.fcntl(descriptor, fcntl.F_GETLEASE) != kind:
            raise OSError(errno.EBUSY, IN_USE, path)

    try:
        yield require_alone
    finally:
        with contextlib.suppress(OSError):  # there was none, or the kernel has taken it
            fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_UNLCK)


def _lease(descriptor: int, kind: int, path: str) -> bool:
    """Whether we have it; False where it is not possible."""
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, kind)
    except OSError as error:
        if error.errno in NOT_POSSIBLE:
            return False
        raise OSError(errno.EBUSY if error.errno == errno.EAGAIN else error.errno, IN_USE, path) from None
    return True

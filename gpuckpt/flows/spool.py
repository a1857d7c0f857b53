"""Where files of an image on another host lie while it is restored here: private, and gone when the restore is over.

    /run/gpuckpt/spools/ID         locked as long as its process lives
        data                       what was fetched, or a link to it below GPUCKPT_TMPDIR

Whatever was killed: the owner of the restore removes what was fetched, or the next dump or restore.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from gpuckpt.flows import gather
from gpuckpt.model.errors import Busy, MachineLacks, Refused
from gpuckpt.model.records import dataclass
from gpuckpt.owner import runs
from gpuckpt.stores import partialimage

if TYPE_CHECKING:
    from collections.abc import Iterator

SPOOLS = "spools"
ROOM_BYTES = 32 << 20
"""What must stay free besides."""


@dataclass(frozen=True, slots=True)
class Spool:
    """The place of one restore."""

    path: Path
    """Where the files lie."""
    entry: Path
    lock_fd: int

    def require_room(self, size: int) -> None:
        """Raises Refused where `size` bytes do not fit."""
        free = gather.free_bytes(self.path)
        if free is not None and free < size + ROOM_BYTES:
            raise Refused(
                f"{self.path.parent if self.path.parent != self.entry else runs.RUNTIME} has no room for "
                f"{size >> 20} MiB of the image that must lie here while it is restored",
                "name a directory with room in GPUCKPT_TMPDIR",
            )

    def empty(self) -> None:
        """Remove what was fetched."""
        shutil.rmtree(self.path, ignore_errors=True)

    def remove(self) -> None:
        """Remove it all."""
        self.empty()
        shutil.rmtree(self.entry, ignore_errors=True)
        os.close(self.lock_fd)


@contextlib.contextmanager
def spool() -> Iterator[Spool]:
    """A spool for the time of the block. Raises MachineLacks where it cannot be made."""
    try:
        made = _make()
    except OSError as error:
        do = "name another directory in GPUCKPT_TMPDIR" if os.environ.get("GPUCKPT_TMPDIR") else "run as root"
        raise MachineLacks(f"{error.filename} cannot be made: {error.strerror}", do) from None
    try:
        yield made
    finally:
        made.remove()


def _make() -> Spool:
    entry = runs.make_runtime(SPOOLS) / os.urandom(4).hex()
    entry.mkdir(mode=0o700)
    lock_fd = partialimage.lock_partial(entry)
    path, elsewhere = entry / "data", os.environ.get("GPUCKPT_TMPDIR")
    if elsewhere:
        # The link first: whoever finds it after a crash finds what lies elsewhere by it.
        there = Path(elsewhere).resolve() / f"gpuckpt-{entry.name}"
        path.symlink_to(there)
        path = there
    made = Spool(path, entry, lock_fd)
    try:
        path.mkdir(mode=0o700)
    except OSError:
        made.remove()
        raise
    return made


def remove_dead() -> None:
    """Remove what killed restores have left. Raises nothing: those who may not look are refused elsewhere."""
    with contextlib.suppress(OSError):
        for entry in (runs.RUNTIME / SPOOLS).iterdir():
            _remove_dead(entry)


def _remove_dead(entry: Path) -> None:
    """Remove what a killed restore has left, holding its lock."""
    try:
        lock_fd = partialimage.lock_partial(entry)
    except Busy:
        return
    path = entry / "data"
    dead = Spool(path.readlink() if path.is_symlink() else path, entry, lock_fd)
    dead.remove()

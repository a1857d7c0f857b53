"""Where what is encrypted in an image lies in clear while gpuckpt works on it: in memory, private, never on a disk.

    /dev/shm/gpuckpt-secret-XXXXXXXX    0700, locked as long as its process lives

Whatever was killed: the owner of a run removes its place, or whoever makes the next one does (as the same user).
"""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path

from gpuckpt.model.errors import Busy, MachineLacks
from gpuckpt.model.records import dataclass
from gpuckpt.owner import runs
from gpuckpt.stores import partialimage
from gpuckpt.system.files import is_in_memory

IN_MEMORY = Path("/dev/shm")  # noqa: S108 - a directory of our own below it, with an unguessable name
PREFIX = "gpuckpt-secret-"


@dataclass(frozen=True, slots=True)
class SecretPlace:
    """A directory in memory of this process's own."""

    path: Path
    lock_fd: int

    def belongs_to(self, run_directory: Path) -> None:
        """Whoever ends that run after a crash removes it. Raises OSError."""
        (run_directory / runs.SECRETS).symlink_to(self.path)

    def empty(self) -> None:
        """Remove all that is in it."""
        with contextlib.suppress(OSError):  # whoever settles the run of a --wait may have removed it
            for entry in list(self.path.iterdir()):
                if entry.is_dir():
                    shutil.rmtree(entry, ignore_errors=True)
                else:
                    entry.unlink(missing_ok=True)

    def remove(self) -> None:
        """Remove it, with all that is in it."""
        shutil.rmtree(self.path, ignore_errors=True)
        with contextlib.suppress(OSError):
            os.close(self.lock_fd)


def notes(place: Path | None, run_directory: Path) -> list[str]:
    """What a person should know where there is a secret place: CRIU's log, in the directory of its run, names files."""
    if place is None or is_in_memory(run_directory):
        return []
    return [f"{runs.RUNTIME} is no tmpfs: the names of the job's files lay on a disk there meanwhile, in CRIU's log"]


def make() -> SecretPlace:
    """Raises MachineLacks where there is no place in memory."""
    if not is_in_memory(IN_MEMORY):
        raise MachineLacks(
            f"{IN_MEMORY} is no tmpfs, and what is encrypted may lie in memory only",
            f"mount -t tmpfs -o mode=1777 tmpfs {IN_MEMORY}",
        )
    for entry in IN_MEMORY.glob(f"{PREFIX}*"):
        _remove_dead(entry)
    while True:
        path = IN_MEMORY / f"{PREFIX}{os.urandom(4).hex()}"
        try:
            path.mkdir(mode=0o700)
        except OSError as error:
            raise MachineLacks(f"{path} cannot be made: {error.strerror}", f"see `ls -ld {IN_MEMORY}`") from None
        # Another gpuckpt may have taken it for a dead one's before it was locked: then it is gone.
        with contextlib.suppress(Busy):
            return SecretPlace(path, partialimage.lock_partial(path))


def _remove_dead(entry: Path) -> None:
    """Remove what a killed process of this user's has left, holding its lock."""
    with contextlib.suppress(Busy, OSError):
        if entry.lstat().st_uid == os.geteuid():
            SecretPlace(entry, partialimage.lock_partial(entry)).remove()

"""--pre-seed: an image of the running tree is sent before it moves; while it stands, only what has changed is sent.

It is written here, for the tree would have to stand as long as the network takes, and pushed while the tree runs. The
real capture then writes no frame that this image has, and the other host links its packs, which lie beside.
"""

from __future__ import annotations

import contextlib
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpuckpt.flows import attempts, far
from gpuckpt.flows import dump as dumping
from gpuckpt.model.errors import LOST, DumpFailed, GpuckptError
from gpuckpt.model.migration import INCOMING_PLACE, SEED
from gpuckpt.model.requests import Hooks
from gpuckpt.stores import directory
from gpuckpt.stores.local import DirectoryStore

if TYPE_CHECKING:
    from gpuckpt.flows.interruption import Interruption
    from gpuckpt.flows.machine import Machine
    from gpuckpt.model.report import Report
    from gpuckpt.model.requests import DumpRequest, MigrateRequest
    from gpuckpt.stores.directory import Image


@dataclass
class Seed:
    """A seed that stands on both hosts."""

    name: str
    image: Image
    data: dict[str, Any]
    """What sending it took."""

    def close(self) -> None:
        """It is not needed here any more."""
        self.image.close()
        shutil.rmtree(self.image.path, ignore_errors=True)


def sow(request: MigrateRequest, dump: DumpRequest, name: str, machine: Machine, interruption: Interruption) -> Seed:
    """Make it and send it. Raises GpuckptError with what became of the tree: it runs on, or this image stays."""
    path = dump.image.with_name(f"{dump.image.name}{SEED}")
    wanted = replace(dump, image=path, leave_running=True, capture_files=("none",), hooks=Hooks())
    made = False

    def note_made() -> None:
        nonlocal made
        made = True

    try:
        report = dumping.dump(wanted, machine, interruption, note_made)
        _require_running(report)
        data = push(request, path, name, machine, interruption)
        return Seed(name, directory.open_image(path), {"frozen_seconds": report.data["frozen_seconds"], **data})
    except BaseException as error:
        needed = isinstance(error, GpuckptError) and error.process in LOST
        if made and not needed:  # what else has that name is somebody's
            shutil.rmtree(path, ignore_errors=True)
        raise


def _require_running(report: Report) -> None:
    if report.error is not None:
        raise report.error
    if report.process != "running":
        raise DumpFailed("the tree ended by itself while an image of it was made", "nothing to move", process="ended")


def push(
    request: MigrateRequest, path: Path, name: str, machine: Machine, interruption: Interruption
) -> dict[str, Any]:
    """Send the image at `path` to where the job's own will lie, as `name`. Raises GpuckptError."""
    place = str(Path(request.reach.location.path or INCOMING_PLACE) / name)
    offer = DirectoryStore().offer(str(path))
    try:
        run = attempts.Run(request.reach, machine.listener, interruption)

        def open_ends() -> attempts.Ends:
            store = far.connect(request.reach, run.pace)
            return run.ends(store, lambda: (offer, store.receive(place, offer.raw_manifest, offer)))

        run.carry(open_ends)
        return {"bytes_sent": run.tally.sent, "seconds": run.tally.seconds}
    finally:
        with contextlib.suppress(OSError):
            offer.close()

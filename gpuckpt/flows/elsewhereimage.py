"""An image on another host as the source of a restore here.

    manifest -> small files into a private place, verified (a pull without the memory) -> checks
    -> frames from the wire into the held tree; or, where that cannot be, all of it into that place first

"Where that cannot be": --plain and images without packs, which CRIU reads from files, and restores that may only
begin once every frame is known to be good (flows/verifying.py).
"""

from __future__ import annotations

import contextlib
import shutil
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from gpuckpt.flows import unsealing, verifying
from gpuckpt.flows.admission import Admission
from gpuckpt.flows.attempts import Ends, Run
from gpuckpt.flows.farimage import FarFrames, FarImage, Opened, begins_again
from gpuckpt.flows.lanes import lane_count
from gpuckpt.flows.leandir import is_packed
from gpuckpt.flows.reconnecting import LOOK_SECONDS, unwaited
from gpuckpt.flows.spool import spool
from gpuckpt.model.errors import ImageCorrupt, Interrupted, TransferFailed
from gpuckpt.model.report import Event
from gpuckpt.owner import runs
from gpuckpt.stores import directory
from gpuckpt.stores.landing import DirectoryArrival
from gpuckpt.stores.protocol import count_pieces

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from gpuckpt.flows.interruption import Interruption
    from gpuckpt.flows.machine import Machine
    from gpuckpt.flows.spool import Spool
    from gpuckpt.images.framesource import FrameSource
    from gpuckpt.images.packindex import Index
    from gpuckpt.model.manifest import Manifest
    from gpuckpt.model.requests import Reach, RestoreRequest
    from gpuckpt.owner.runs import Run as OwnRun
    from gpuckpt.stores.directory import Image

SMALL, WHOLE = "small", "whole"
"""Names in the private place: without the memory, and with it."""

UNREAD = "the memory was not read: `gpuckpt inspect --verify` has it read where it lies"


def memory_of(manifest: Manifest) -> frozenset[str]:
    """The parts that hold memory: packs, or CRIU's own pages files."""
    pages = (part.path for part in manifest.parts if part.path.startswith("criu/pages-"))
    return verifying.packs_of(manifest) or frozenset(pages)


class Elsewhere:
    """An image on another host."""

    image: Image
    admission: Admission | None = None

    def __init__(
        self, request: RestoreRequest, far: FarImage, place: Spool, machine: Machine, look: Interruption
    ) -> None:
        self.request = request
        self.notes: list[str] = []
        self._far, self._place, self._machine, self._interruption = far, place, machine, look
        self._fetched_bytes = 0
        self._seconds = 0.0
        self._expected_bytes = 0
        self._shown_at = 0.0
        self._whole = False
        self._fetch(SMALL)

    @classmethod
    @contextlib.contextmanager
    def opened(
        cls, request: RestoreRequest, reach: Reach, machine: Machine, interruption: Interruption
    ) -> Iterator[Elsewhere]:
        """Reach it and fetch its small files. Raises GpuckptError."""

        def tell(words: str) -> None:
            machine.listener(Event("transfer", "note", words))

        with spool() as place, contextlib.ExitStack() as stack:
            admission = Admission.of(request.allowed_signers)
            far = FarImage(reach, tell, admit=admission)
            stack.callback(far.end)
            source = cls(request, far, place, machine, interruption)
            source.admission = admission
            stack.callback(source.close)
            yield source

    def _fetch(self, name: str) -> None:
        """Have the image here, with or without its memory. Raises GpuckptError."""
        run = Run(self._far.reach, self._machine.listener, self._interruption)
        connections = iter(range(1 << 30))

        def open_ends() -> Ends:
            if next(connections):
                self._far.let_go()  # the last one broke
            opened = self._far.current()
            return run.ends(_Kept(opened), lambda: (opened.offer, self._arrival(opened, name)))

        try:
            run.carry(open_ends)
        except Interrupted as ended:
            raise Interrupted(ended.signal_number, "broken off; nothing was touched", process="untouched") from None
        except TransferFailed as failure:
            raise begins_again(failure) from None
        self.notes += [note for note in run.tally.notes if note not in self.notes]
        self._fetched_bytes += run.tally.sent
        self._seconds += sum(run.tally.seconds.values())
        identity, at_hand = self.request.identity, self.request.identity_at_hand
        self._view = unsealing.open_image(self._place.path / name, None, identity, at_hand=at_hand)
        self.image = self._view.image
        self.request = replace(self.request, image=self.image.path)

    def _arrival(self, opened: Opened, name: str) -> DirectoryArrival:
        manifest = opened.offer.manifest
        without = memory_of(manifest) if name == SMALL else frozenset()
        self._place.require_room(directory.sizes([part for part in manifest.parts if part.path not in without]))
        return DirectoryArrival(self._place.path / name, opened.offer.raw_manifest, without)

    def verify(self, _interruption: Interruption) -> None:
        """The small files were compared as they came."""
        later = memory_of(self.image.manifest)
        if any(captured.part in later for captured in self.image.manifest.captured):
            raise ImageCorrupt("a captured file of the image lies in its memory", "do not restore this image")
        verifying.require_its_tree(self.image)
        if self.request.dry_run:
            self.notes.append(UNREAD)

    def complete(self, interruption: Interruption) -> None:
        """Fetch the memory too, where it must be here before anything is touched."""
        why = self._why_whole()
        if not why:
            return
        small = self._view
        shutil.rmtree(self._place.path / SMALL)
        self._fetch(WHOLE)
        small.close()
        self._whole = True
        if is_packed(self.image) and verifying.needs_all_frames(self.image, self.request):
            verifying.verify_frames(self._view, interruption)
        self.notes.append(f"the whole image was fetched to {self._place.path} for the time of the restore: {why}")

    def _why_whole(self) -> str:
        if not is_packed(self.image):
            return "its memory does not lie in packs"
        if self.request.plain:
            return "with --plain CRIU reads the memory from files"
        if verifying.needs_all_frames(self.image, self.request):
            return "all of it must be known to be good before kept connections or link-remap files are used"
        return ""

    def belongs_to(self, run: OwnRun) -> None:
        """The owner removes what was fetched, should we be killed."""
        (run.directory / runs.FETCHED).symlink_to(self._place.path)
        self._view.belongs_to(run.directory)

    def open_frames(self, index: Index) -> FrameSource:
        """Over the wire, where they were not fetched."""
        if self._whole:
            return self._view.open_packs(index)
        self._expected_bytes = sum(frame.stored for frames in index.files.values() for frame in frames)
        opened = unwaited(self._far.insist, self._interruption.check, lambda _opened: None)

        def connections(size: int) -> int:
            return lane_count(self._far.reach.connections, opened.round_trip_seconds, size, count_pieces(size))

        return FarFrames(self._far, self._view.stored.manifest, index, connections, self._interruption.check)

    def show_progress(self) -> None:
        """The bytes that have come over the wire."""
        if not self._whole and time.monotonic() - self._shown_at > LOOK_SECONDS:
            self._shown_at = time.monotonic()
            done, total = self._far.received_bytes, self._expected_bytes
            self._machine.listener(Event("inject", "progress", done_bytes=done, total_bytes=total))

    def report(self) -> dict[str, Any]:
        """What came over the wire."""
        signed = {} if self.admission is None else {"signed_by": self.admission.report()}
        return {
            **signed,
            "bytes_fetched": self._fetched_bytes + self._far.received_bytes,
            "connections": max(1, self._far.connections),
        }

    @property
    def seconds(self) -> dict[str, float]:
        """How long the fetching took before the tree was built."""
        return {"transfer": self._seconds}

    def close(self) -> None:
        """Let the small files go."""
        self._view.close()

    @property
    def secret_place(self) -> Path | None:
        """Where its small files lie in clear, of an encrypted one."""
        return self._view.place.path if self._view.place is not None else None

    def let_go(self) -> None:
        """The tree is up: neither the other side nor the memory are needed any more."""
        self._far.end()
        self._view.let_go()
        for part in memory_of(self._view.stored.manifest):
            with contextlib.suppress(OSError):
                self._view.stored.part(part).unlink()


class _Kept:
    """The other end of a fetch, whose connection is used again afterwards."""

    def __init__(self, opened: Opened) -> None:
        self._opened = opened
        self.why = opened.store.why

    def round_trip_seconds(self) -> float:
        """As it was measured."""
        return self._opened.round_trip_seconds

    def keep_alive(self) -> None:
        """Say that we live."""
        self._opened.store.keep_alive()

    def close(self) -> None:
        """It stays open."""

"""Where the image of a restore lies: on this host, or on another one.

The restore sees an `Image` with the small files in it, asks for frames, and is told when it may rely on them;
which of the two it is makes no other difference to it.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Protocol

from gpuckpt.flows import unsealing, verifying
from gpuckpt.flows.admission import Admission

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from gpuckpt.flows.interruption import Interruption
    from gpuckpt.flows.machine import Machine
    from gpuckpt.flows.unsealing import View
    from gpuckpt.images.framesource import FrameSource
    from gpuckpt.images.packindex import Index
    from gpuckpt.model.requests import RestoreRequest
    from gpuckpt.owner.runs import Run
    from gpuckpt.stores.directory import Image


class ImageSource(Protocol):
    """The image of one restore, open."""

    image: Image
    """Here and in clear, as far as that: not its packs, which `open_frames` gets."""
    request: RestoreRequest
    """With the place of `image` in it."""
    notes: list[str]

    def verify(self, interruption: Interruption) -> None:
        """What must be good before the checks. Raises ImageCorrupt, BrokenOff."""

    def complete(self, interruption: Interruption) -> None:
        """After the checks: see to what must be here, and verified, before anything is touched.

        Raises ImageCorrupt, Refused, TransferFailed, Interrupted, BrokenOff.
        """

    def belongs_to(self, run: Run) -> None:
        """Whoever ends that run after a crash removes what was fetched for it."""

    def open_frames(self, index: Index) -> FrameSource:
        """The frames of the index. Raises ImageCorrupt, GpuckptError."""

    def show_progress(self) -> None:
        """Tell how many bytes have come, where they come from elsewhere."""

    def report(self) -> dict[str, Any]:
        """What it adds to the data of the report."""

    @property
    def seconds(self) -> dict[str, float]:
        """Phases before the owner's."""

    @property
    def secret_place(self) -> Path | None:
        """Where what CRIU reads must lie, in memory: of an encrypted image."""

    def let_go(self) -> None:
        """The tree is up: only its manifest is still needed."""


class Here:
    """An image in a directory of this host."""

    def __init__(self, request: RestoreRequest, view: View, admission: Admission | None = None) -> None:
        self.request, self.image, self._view, self._admission = request, view.image, view, admission
        self.notes: list[str] = []

    def verify(self, interruption: Interruption) -> None:
        """All of it that is not verified as it is used."""
        verifying.verify_before_restore(self._view, self.request, interruption)

    def complete(self, interruption: Interruption) -> None:
        """It is."""

    def belongs_to(self, run: Run) -> None:
        """Only what of it lies in clear."""
        self._view.belongs_to(run.directory)

    def open_frames(self, index: Index) -> FrameSource:
        """From its packs."""
        return self._view.open_packs(index)

    def show_progress(self) -> None:
        """It is quick."""

    def report(self) -> dict[str, Any]:
        """Who signed it, where that was asked."""
        return {} if self._admission is None else {"signed_by": self._admission.report()}

    @property
    def seconds(self) -> dict[str, float]:
        """None."""
        return {}

    @property
    def secret_place(self) -> Path | None:
        """Where the rest of it lies in clear."""
        return self._view.place.path if self._view.place is not None else None

    def let_go(self) -> None:
        """Its lock stays until the restore is over."""
        self._view.let_go()


@contextlib.contextmanager
def opened(request: RestoreRequest, machine: Machine, interruption: Interruption) -> Iterator[ImageSource]:
    """The image of a request. Raises what opening an image raises; for one elsewhere also what reaching it does."""
    if request.reach is not None:
        from gpuckpt.flows.elsewhereimage import Elsewhere  # noqa: PLC0415  ssh and its kin are for those who use it

        with Elsewhere.opened(request, request.reach, machine, interruption) as far:
            yield far
        return
    admission = Admission.of(request.allowed_signers)
    view = unsealing.open_image(request.image, admission, request.identity, at_hand=request.identity_at_hand)
    try:
        yield Here(request, view, admission)
    finally:
        view.close()

"""Where the image of a restore lies: on this host, or on another one.

The restore sees an `Image` with the small files in it, asks for frames, and is told when it may rely on them;
which of the two it is makes no other difference to it.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Protocol

from gpuckpt.flows import verifying
from gpuckpt.flows.admission import Admission
from gpuckpt.images.packs import PackReader
from gpuckpt.stores import directory

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from gpuckpt.flows.interruption import Interruption
    from gpuckpt.flows.machine import Machine
    from gpuckpt.images.framesource import FrameSource
    from gpuckpt.images.packindex import Index
    from gpuckpt.model.requests import RestoreRequest
    from gpuckpt.owner.runs import Run
    from gpuckpt.stores.directory import Image


class ImageSource(Protocol):
    """The image of one restore, open."""

    image: Image
    """Here, as far as it is here: not its packs where `open_frames` gets them from elsewhere."""
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

    def open_frames(self, packs: Path, index: Index) -> FrameSource:
        """The frames of the index. Raises ImageCorrupt, GpuckptError."""

    def show_progress(self) -> None:
        """Tell how many bytes have come, where they come from elsewhere."""

    def report(self) -> dict[str, Any]:
        """What it adds to the data of the report."""

    @property
    def seconds(self) -> dict[str, float]:
        """Phases before the owner's."""

    def let_go(self) -> None:
        """The tree is up: only its small files are still needed."""


class Here:
    """An image in a directory of this host."""

    def __init__(self, request: RestoreRequest, image: Image) -> None:
        self.request, self.image = request, image
        self.notes: list[str] = []

    def verify(self, interruption: Interruption) -> None:
        """All of it that is not verified as it is used."""
        verifying.verify_before_restore(self.image, self.request, interruption)

    def complete(self, interruption: Interruption) -> None:
        """It is."""

    def belongs_to(self, run: Run) -> None:
        """Nothing was fetched."""

    def open_frames(self, packs: Path, index: Index) -> FrameSource:
        """From its packs."""
        return PackReader(packs, index)

    def show_progress(self) -> None:
        """It is quick."""

    def report(self) -> dict[str, Any]:
        """Nothing more."""
        return {}

    @property
    def seconds(self) -> dict[str, float]:
        """None."""
        return {}

    def let_go(self) -> None:
        """Its lock stays until the restore is over."""


@contextlib.contextmanager
def opened(request: RestoreRequest, machine: Machine, interruption: Interruption) -> Iterator[ImageSource]:
    """The image of a request. Raises what opening an image raises; for one elsewhere also what reaching it does."""
    if request.reach is not None:
        from gpuckpt.flows.elsewhereimage import Elsewhere  # noqa: PLC0415  ssh and its kin are for those who use it

        with Elsewhere.opened(request, request.reach, machine, interruption) as far:
            yield far
        return
    admission = Admission.of(request.allowed_signers)
    image = directory.open_image(request.image, admission)
    try:
        yield Here(request, image)
    finally:
        image.close()

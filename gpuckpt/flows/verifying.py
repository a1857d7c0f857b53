"""Verifying an image before a restore: never more than once, and never later than its bytes are used.

Every small file, the index and captured files are verified before CRIU starts. Frames of memory are
verified as they are read, which is before an instruction of the program runs: a bad one ends the held
tree. But a restore that fails there may have cost something outside: connections that were kept, the
link-remap files that CRIU consumes. Then all frames are read beforehand.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpuckpt.flows.leandir import PACKS, PackedMemory, is_packed
from gpuckpt.images import criuformat, framesource
from gpuckpt.model.errors import ImageCorrupt
from gpuckpt.model.manifest import LINK_REMAP
from gpuckpt.stores import directory
from gpuckpt.system.netlock import Connection

if TYPE_CHECKING:
    from gpuckpt.flows.interruption import Interruption
    from gpuckpt.flows.unsealing import View
    from gpuckpt.model.manifest import Manifest
    from gpuckpt.model.requests import RestoreRequest
    from gpuckpt.stores.directory import Image


def verify_before_restore(view: View, request: RestoreRequest, interruption: Interruption) -> None:
    """All that must be known to be good before the checks of a restore. Raises ImageCorrupt, BrokenOff."""
    verify_small_files(view.stored, interruption)
    require_its_tree(view.image)
    # With a dry run there is no later moment.
    if is_packed(view.image) and (request.dry_run or needs_all_frames(view.image, request)):
        verify_frames(view, interruption)


def require_its_tree(image: Image) -> None:
    """CRIU's files are of the processes that the manifest names. Raises ImageCorrupt."""
    in_image = criuformat.read_process_list(image.part("criu/pstree.img"))
    if {process.pid for process in in_image} != set(image.manifest.tree.pids):
        raise ImageCorrupt("criu/pstree.img holds other processes than the manifest", "do not restore this image")


def verify_small_files(image: Image, interruption: Interruption) -> None:
    """All but the packs, whose frames are verified as they are read. Raises ImageCorrupt, BrokenOff."""
    directory.verify(image, interruption.check, but=packs_of(image.manifest))


def packs_of(manifest: Manifest) -> frozenset[str]:
    """The parts that hold frames of memory."""
    found = (part.path for part in manifest.parts if part.path.startswith(f"{PACKS}/") and part.path.endswith(".zst"))
    return frozenset(found) if PACKS in manifest.requires else frozenset()


def needs_all_frames(image: Image, request: RestoreRequest) -> bool:
    """A restore that fails late would leave something changed: then every frame is verified beforehand."""
    if any(captured.reason == LINK_REMAP for captured in image.manifest.captured):
        return True
    return bool(kept_connections(image, request))


def kept_connections(image: Image, request: RestoreRequest) -> tuple[Connection, ...]:
    """The connections that leave the tree and go on with it."""
    if (request.tcp or image.manifest.tcp) != "keep":
        return ()
    found = criuformat.outside_sockets(image.part("criu/files.img").read_bytes())
    return tuple(
        Connection(criuformat.plain(one.source), one.source_port, criuformat.plain(one.target), one.target_port)
        for one in found
    )


def verify_frames(view: View, interruption: Interruption) -> None:
    """Read every frame with all cores. Raises ImageCorrupt, BrokenOff."""
    packed = PackedMemory(view.image, view.open_packs)
    try:
        framesource.verify_all(packed.reader, packed.index, interruption.check)
    finally:
        packed.close()

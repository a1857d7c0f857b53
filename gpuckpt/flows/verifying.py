"""Verifying an image before a restore: never more than once, and never later than its bytes are used.

Every small file, the index and captured files are verified before CRIU starts. Frames of memory are
verified as they are read, which is before an instruction of the program runs: a bad one ends the held
tree. But a restore that fails there may have cost something outside: connections that were kept, the
link-remap files that CRIU consumes. Then all frames are read beforehand.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpuckpt.flows.leandir import PACKS, PackedMemory, is_packed
from gpuckpt.images import criuformat, lean
from gpuckpt.model.errors import ImageCorrupt
from gpuckpt.model.manifest import LINK_REMAP
from gpuckpt.stores import directory

if TYPE_CHECKING:
    from gpuckpt.flows.interruption import Interruption
    from gpuckpt.model.requests import RestoreRequest
    from gpuckpt.stores.directory import Image


def verify_before_restore(image: Image, request: RestoreRequest, interruption: Interruption) -> None:
    """Raises ImageCorrupt, BrokenOff."""
    verify_small_files(image, interruption)
    in_image = criuformat.read_process_list(image.part("criu/pstree.img"))
    if {process.pid for process in in_image} != set(image.manifest.tree.pids):
        raise ImageCorrupt("criu/pstree.img holds other processes than the manifest", "do not restore this image")
    if is_packed(image) and _all_frames_first(image, request):
        verify_frames(image, interruption)


def verify_small_files(image: Image, interruption: Interruption) -> None:
    """All but the packs, whose frames are verified as they are read. Raises ImageCorrupt, BrokenOff."""
    packs = frozenset(part.path for part in image.manifest.parts if _is_pack(part.path)) if is_packed(image) else ()
    directory.verify(image, interruption.check, but=frozenset(packs))


def _is_pack(part: str) -> bool:
    return part.startswith(f"{PACKS}/") and part.endswith(".zst")


def _all_frames_first(image: Image, request: RestoreRequest) -> bool:
    """With a dry run there is no later moment; otherwise where a failed restore would leave something changed."""
    if request.dry_run or any(captured.reason == LINK_REMAP for captured in image.manifest.captured):
        return True
    if (request.tcp or image.manifest.tcp) != "keep":
        return False
    return bool(criuformat.outside_sockets(image.part("criu/files.img").read_bytes()))


def verify_frames(image: Image, interruption: Interruption) -> None:
    """Read every frame with all cores. Raises ImageCorrupt, BrokenOff."""
    packed = PackedMemory(image)
    try:
        interruption.check()
        packed.reader.verify_all(lean.workers())
        interruption.check()
    finally:
        packed.close()

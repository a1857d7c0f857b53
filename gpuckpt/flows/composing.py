"""From a complete capture to the manifest of its image, and what is looked at before it may be called one."""

from __future__ import annotations

import contextlib
import shutil
import time
from typing import TYPE_CHECKING, Any

from gpuckpt import __version__, checks
from gpuckpt.flows import dumporder, gather
from gpuckpt.flows.unsealing import LOG
from gpuckpt.images import criuformat
from gpuckpt.model import manifest as manifests
from gpuckpt.model.errors import ImageCorrupt
from gpuckpt.model.manifest import CudaSuspension, Manifest
from gpuckpt.model.records import dataclass
from gpuckpt.stores import directory

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence
    from pathlib import Path

    from gpuckpt.checks.facts import DumpFacts
    from gpuckpt.flows.capturing import Content
    from gpuckpt.flows.openfiles import SavedFiles
    from gpuckpt.flows.sealing import Sealing
    from gpuckpt.model.facts import Tree
    from gpuckpt.model.report import Finding
    from gpuckpt.model.requests import DumpRequest
    from gpuckpt.owner.messages import CudaMember
    from gpuckpt.stores.directory import Image
    from gpuckpt.stores.partialimage import PartialImage


@dataclass(frozen=True, slots=True)
class Capture:
    """A complete capture whose tree still stands at the gate."""

    partial: PartialImage
    said: dict[str, Any]
    """The owner's word: seconds, run_id, log."""
    saved: tuple[manifests.CapturedFile, ...]
    """CRIU's link-remap files."""
    files: SavedFiles
    tree: Tree
    """As it stands still: what the manifest must say."""


def manifest_of(
    capture: Capture,
    content: Content,
    seconds: dict[str, float],
    done: dict[str, Any] | None,
    *,
    request: DumpRequest,
    facts: DumpFacts,
    findings: Sequence[Finding],
    notes: Sequence[str],
    base: Image | None,
    image_id: str,
) -> Manifest:
    """What the image says of itself. `done` is the owner's word when the tree goes on already."""
    inventory = criuformat.read_inventory(capture.partial.criu / "inventory.img")
    tree = capture.tree
    created = time.time()
    return Manifest(
        format=manifests.FORMAT,
        requires=(*content.requires, *(("open-files",) if capture.files.files else ())),
        image_id=image_id,
        created=created,
        gpuckpt=__version__,
        host=facts.host,
        tree=tree,
        criu=dumporder.criu_options(facts, run_id=capture.said.get("run_id") or inventory.run_id, lsm=inventory.lsm),
        parts=content.parts,
        captured=(*capture.saved, *(one.captured for one in capture.files.files)),
        stopped=tree.stopped,
        handed_over_stopped=bool(tree.cuda),
        cuda=tuple(_suspension(member, capture.said.get("copies", {})) for member in dumporder.members(tree)),
        tcp=request.tcp,
        left_running=request.leave_running,
        lineage=gather.lineage_of(tree.root),
        seconds=seconds,
        frozen_seconds=done["frozen_seconds"] if done else sum(seconds.values()),
        stopped_seconds=done["stopped_seconds"] if done else sum(seconds.values()),
        bytes_raw=content.bytes_raw,
        bytes_stored=directory.sizes(content.stored),
        bytes_shared=content.bytes_shared,
        allowed=tuple(finding.id for finding in findings if finding.allowed),
        notes=(*notes, *content.notes),
        full_created=base.manifest.full_created if base and content.bytes_shared else created,
    )


def _suspension(member: CudaMember, copies: dict[str, list[list[int]]]) -> CudaSuspension:
    ranges = tuple((start, end) for start, end in copies.get(str(member.id.pid), ())[: manifests.MOST_COPIES])
    return CudaSuspension(member.id, member.restore_tid, member.memory_bytes, ranges)


def restorable(manifest: Manifest, captured: Collection[str], *, left_running: bool) -> dict[str, Any]:
    """Whether the image can be restored as it is, however long the job that was left running goes on."""
    written = checks.writable_files(manifest.tree) if left_running else ()
    needed = {file.path: file.size for file in written if file.path not in captured}
    return {"restorable": "with-files", "needs_files": needed} if needed else {"restorable": "yes"}


def copy_log(log: Path, partial: PartialImage, sealing: Sealing | None) -> None:
    """CRIU's log travels along; it is no part of the digests, and its loss costs nothing."""
    with contextlib.suppress(OSError):
        if sealing is not None:
            sealing.seal_bytes(partial, LOG, log.read_bytes())
            return
        target = partial.path / LOG
        shutil.copyfile(log, target)
        target.chmod(0o600)


def refuse_other_processes(criu_directory: Path, tree: Tree) -> None:
    """The image must hold exactly the processes of the manifest, which were read while all stood still.

    Raises ImageCorrupt.
    """
    in_image = {process.pid for process in criuformat.read_process_list(criu_directory / "pstree.img")}
    # CRIU saves no address space of a zombie: what has one there, and no program any more, was ended since.
    alive = {pid for pid in in_image if (criu_directory / f"mm-{pid}.img").exists()}
    ended = alive - {process.pid for process in tree.processes if process.exe}
    if in_image != set(tree.pids) or ended:
        fresh = ", ".join(str(pid) for pid in sorted((in_image ^ set(tree.pids)) | ended))
        raise ImageCorrupt(f"the tree changed while it was dumped (processes {fresh})", "try again")

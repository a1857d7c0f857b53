"""The manifest of an image that is not made yet: what the other host of a migration judges, and what it will take."""

from __future__ import annotations

import stat
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from gpuckpt import __version__, checks
from gpuckpt.checks import image as imagechecks
from gpuckpt.flows import dumporder, gather
from gpuckpt.flows.describe import estimate_bytes
from gpuckpt.model import manifest as manifests
from gpuckpt.model.manifest import OPEN, CapturedFile, CudaSuspension, Manifest, Part

if TYPE_CHECKING:
    from gpuckpt.checks.facts import DumpFacts
    from gpuckpt.flows.destination import Judged
    from gpuckpt.model.facts import OpenFile
    from gpuckpt.model.report import Finding


UNKNOWN = "0" * 64
"""The digest of a part that is not made yet."""

FIXED_SECONDS = 1.5
"""What a migration stands still for without a byte of memory: CRIU twice, the questions. Seen on 2 cores."""

MEMORY_BYTES_PER_SECOND = 1.0e9
"""How fast memory goes out and in again, roughly: both ends together, on few cores."""


LARGE = 1 << 20
"""Bytes of a file that is worth sending before the job stands still (flows/presending.py)."""
WORTH_IT = 8 << 20
"""Bytes in such files, below which another connection costs more time than that saves."""


def encode(facts: DumpFacts, image_id: str) -> bytes:
    """The draft, as manifest.json. Raises GpuckptError where it could not be read again."""
    tree = facts.tree
    files = [_as_captured(number, file) for number, file in enumerate(carried(facts))]
    manifest = Manifest(
        format=manifests.FORMAT,
        requires=("packs", *(("open-files",) if files else ())),
        image_id=image_id,
        created=time.time(),
        gpuckpt=__version__,
        host=facts.host,
        tree=tree,
        criu=dumporder.criu_options(facts, run_id="", lsm=""),
        parts=tuple(part for _, part in files),
        captured=tuple(captured for captured, _ in files),
        stopped=tree.stopped,
        handed_over_stopped=bool(tree.cuda),
        cuda=tuple(CudaSuspension(one.id, one.restore_tid, one.memory_bytes) for one in dumporder.members(tree)),
        tcp=facts.request.tcp,
        left_running=False,
        lineage=gather.lineage_of(tree.root),
        bytes_raw=estimate_bytes(tree),
    )
    return manifests.encode(manifest)


def carried(facts: DumpFacts) -> tuple[OpenFile, ...]:
    """The files that go along, as far as they are wanted there."""
    return checks.chosen_files(facts.request, facts.tree).files


def large_files(facts: DumpFacts) -> tuple[OpenFile, ...]:
    """Those of them that are sent while the job still runs."""
    found = tuple(file for file in carried(facts) if file.size >= LARGE)
    return found if sum(file.size for file in found) >= WORTH_IT else ()


def _as_captured(number: int, file: OpenFile) -> tuple[CapturedFile, Part]:
    name = f"files/open-{number}"
    times = round(file.mtime * 1_000_000_000)
    captured = CapturedFile(file.path, name, OPEN, stat.S_IMODE(file.mode), file.uid, file.gid, times)
    return captured, Part(name, file.size, UNKNOWN)


def room(facts: DumpFacts, judged: Judged, where: str) -> tuple[Finding, ...]:
    """Whether the image will fit there."""
    there = replace(facts, image_space_bytes=judged.space_bytes, image_in_memory=False)
    finding = imagechecks.DISK_SPACE.finding(there, facts.request.allow)
    return () if finding is None else (replace(finding, found=f"on {where}: {finding.found}"),)


def estimate(facts: DumpFacts, bytes_per_second: float) -> dict[str, Any]:
    """What --dry-run says: bytes of the image before compression, and seconds, all of it roughly."""
    size = estimate_bytes(facts.tree) + sum(file.size for file in carried(facts))
    # The large files still go over the disks, in and out, while it stands.
    transfer = (size - sum(file.size for file in large_files(facts))) / bytes_per_second
    return {
        "image_bytes": size,
        "bytes_per_second": bytes_per_second,
        "transfer_seconds": transfer,
        "downtime_seconds": FIXED_SECONDS + transfer + size / MEMORY_BYTES_PER_SECOND,
    }

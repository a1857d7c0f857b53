"""Large files that go along with a job, sent while it runs: while it stands, only those that have changed since.

They travel as an image with nothing in it but files, beside which the job's own will lie: out of it the other host
links what has the digest that the job's image names (stores/landing.py). A file that is written to meanwhile is left
for later.
"""

from __future__ import annotations

import contextlib
import shutil
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from gpuckpt.flows import draft, gather, seeding
from gpuckpt.flows.handover import require_going_on
from gpuckpt.images import openfiles
from gpuckpt.model import manifest as manifests
from gpuckpt.model.errors import in_words
from gpuckpt.model.migration import FILES
from gpuckpt.model.report import Event
from gpuckpt.stores import directory, partialimage

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from gpuckpt.flows.destination import Look
    from gpuckpt.flows.interruption import Interruption
    from gpuckpt.flows.machine import Machine
    from gpuckpt.model.manifest import CapturedFile
    from gpuckpt.model.requests import DumpRequest, MigrateRequest
    from gpuckpt.stores.partialimage import PartialImage

ROOM_FOR_THE_JOB = 2
"""A file whose copy would take more than one part in so many of what is free is sent later: the job runs on and writes,
and a full disk can end it."""


def send(
    request: MigrateRequest, dump: DumpRequest, seen: Look, machine: Machine, interruption: Interruption
) -> dict[str, Any]:
    """What sending them took, for the report. What cannot be sent now is sent later.

    Raises GpuckptError with what became of the tree: it runs on.
    """
    path = dump.image.with_name(f"{dump.image.name}{FILES}")
    try:
        count = _save(path, seen, lambda: require_going_on(interruption))
    except OSError as error:
        machine.listener(Event("files", "note", f"files could not be sent beforehand: {in_words(error)}"))
        count = 0
    if not count:
        return {"files": 0, "bytes_sent": 0}
    try:
        return {"files": count, **seeding.push(request, path, seen.terms.files, machine, interruption)}
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _save(path: Path, seen: Look, going_on: Callable[[], None]) -> int:
    """Make the image; returns how many files are in it. Raises OSError, GpuckptError: then nothing is there of it.

    What has its name already is somebody's: refused.
    """
    partial, _ = partialimage.create_partial(path)
    try:
        saved = []
        for number, file in enumerate(draft.large_files(seen.facts)):
            free = gather.free_bytes(partial.path)
            if free is not None and free < file.size * ROOM_FOR_THE_JOB:
                continue
            # One that is written to meanwhile is sent later.
            with contextlib.suppress(openfiles.NotSaved):
                saved.append(openfiles.save(file, number, partial.files, going_on).captured)
        if saved:
            partial.publish(_manifest(partial, saved, seen, going_on))
    except BaseException:
        partial.discard()
        raise
    if not saved:
        partial.discard()
    return len(saved)


def _manifest(partial: PartialImage, saved: Sequence[CapturedFile], seen: Look, going_on: Callable[[], None]) -> bytes:
    """That of the job as it is now, without its memory: nobody restores this."""
    job = manifests.decode(draft.encode(seen.facts, seen.terms.transaction), "the draft")
    parts = directory.describe_parts(partial.path, going_on)
    return manifests.encode(replace(job, parts=parts, captured=tuple(saved), bytes_stored=directory.sizes(parts)))

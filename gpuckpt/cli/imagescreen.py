"""The screens of an image: the first one, its lists, and how it differs from another."""

from __future__ import annotations

import time

from gpuckpt.cli.diffsheet import add_comparison, difference_verdict
from gpuckpt.cli.imagesheet import add_captured, add_origin, add_parts, add_timings, image_facts, image_verdict
from gpuckpt.cli.manner import Manner
from gpuckpt.cli.memorysheet import add_memory
from gpuckpt.cli.sections import Drawings, add_sections, has_first_screen
from gpuckpt.cli.sheet import Sheet
from gpuckpt.cli.treelists import add_files, add_gpus, add_job_environment, add_sockets
from gpuckpt.cli.treesheet import add_processes
from gpuckpt.model.inspection import Comparison, MemoryPicture
from gpuckpt.model.jsonform import from_json
from gpuckpt.model.manifest import Manifest
from gpuckpt.model.report import Report


def draw_image(sheet: Sheet, report: Report, manner: Manner) -> None:
    """Draw what was asked for."""
    data = report.data
    manifest, name = from_json(Manifest, data["manifest"]), str(data.get("path", ""))
    if data.get("diff"):
        comparison = from_json(Comparison, data["diff"])
        sheet.title("Image", name, difference_verdict(comparison, manifest))
        add_comparison(sheet, comparison)
        return
    sheet.title("Image", name, image_verdict(data, report.findings))
    if has_first_screen(manner):
        sheet.facts(image_facts(manifest, data, now=time.time()))
        add_processes(sheet, manifest.tree)
    memory = from_json(MemoryPicture, data["memory"]) if data.get("memory") else None
    add_sections(sheet, report, manner, _lists(sheet, manifest, memory))


def _lists(sheet: Sheet, manifest: Manifest, memory: MemoryPicture | None) -> Drawings:
    return {
        "files": lambda: _add_files(sheet, manifest),
        "sockets": lambda: add_sockets(sheet, manifest.tree),
        "memory": lambda: _add_memory(sheet, manifest, memory),
        "gpus": lambda: add_gpus(sheet, manifest.tree, manifest.host),
        "environment": lambda: _add_environment(sheet, manifest),
        "timings": lambda: add_timings(sheet, manifest),
    }


def _add_files(sheet: Sheet, manifest: Manifest) -> None:
    add_files(sheet, manifest.tree)
    add_captured(sheet, manifest)


def _add_memory(sheet: Sheet, manifest: Manifest, memory: MemoryPicture | None) -> None:
    if memory is not None:  # of an image on another host only the manifest is here
        add_memory(sheet, memory)
    add_parts(sheet, manifest)


def _add_environment(sheet: Sheet, manifest: Manifest) -> None:
    add_origin(sheet, manifest)
    add_job_environment(sheet, manifest.tree)

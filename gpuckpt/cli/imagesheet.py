"""The parts of a screen that only an image has: its header, what is in it, how long it took."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from rich.text import Text

from gpuckpt.cli import words
from gpuckpt.cli.sheet import BAD, FAINT, GOOD, UNSURE, Cell, Sheet, bar
from gpuckpt.cli.treesheet import tree_facts
from gpuckpt.model.manifest import Manifest, Part
from gpuckpt.model.report import PHASES, Finding

BAR_WIDTH = 24


def image_verdict(data: dict[str, Any], findings: Iterable[Finding]) -> Text:
    """Whether this host, or the one that was asked, can restore the image."""
    refusing = sum(finding.blocks for finding in findings)
    where = f"on {words.safe(data['against'])}" if data.get("against") else "here"
    if data.get("verified") is False:
        return Text("damaged: it cannot be restored", BAD)
    if (data.get("encrypted") or {}).get("opened") is False:
        return Text("encrypted: whether it can be restored here shows only with --identity", UNSURE)
    if data.get("restorable") == "yes":
        return Text(f"can be restored {where}", GOOD)
    if data.get("restorable") == "no":
        checks = f": {words.count(refusing, 'check')} in the way" if refusing else ""
        return Text(f"cannot be restored {where} now{checks}", BAD)
    return Text(f"not known whether it can be restored {where}", UNSURE)


def image_facts(manifest: Manifest, data: dict[str, Any], *, now: float) -> Iterator[tuple[str, Cell]]:
    """The header of an image."""
    yield "id", manifest.image_id
    yield "made", f"{words.moment(manifest.created)}{_age(now - manifest.created)}, on {manifest.host.hostname}"
    yield "size", _sizes(manifest, data.get("bytes_on_disk"))
    frozen = words.duration(manifest.frozen_seconds)
    yield "dump", f"frozen {frozen}; the tree {'went on' if manifest.left_running else 'ended with it'}"
    yield "lineage", _lineage(manifest)
    yield "verified", _verified(data.get("verified"))
    yield "signed", _signed(data.get("signed_by"))
    yield "encrypted", _encrypted(data.get("encrypted"))
    for copy in data.get("protected") or ():
        yield "copy", _copy(copy, now)
    policy = {"keep": "kept (--tcp keep)", "close": "closed (--tcp close)"}.get(manifest.tcp, "")
    yield from tree_facts(manifest.tree, manifest.host, captured=len(manifest.captured), tcp=policy)
    yield "allowed", ", ".join(manifest.allowed)
    for note in manifest.notes:
        yield "note", note


def _age(seconds: float) -> str:
    if seconds < 1:
        return ""
    return f", {words.duration(seconds)} ago" if seconds >= 100 else f", {seconds:.0f} s ago"


def _copy(copy: dict[str, Any], now: float) -> str:
    since = copy.get("time", now)
    return f"{words.safe(copy.get('host'))}:{words.safe(copy.get('path'))}, {words.moment(since)}{_age(now - since)}"


def _sizes(manifest: Manifest, on_disk: Any) -> str:
    parts = [f"{words.size(manifest.bytes_raw)} of memory", f"{words.size(manifest.bytes_stored)} stored"]
    if isinstance(on_disk, int):
        parts.append(f"{words.size(on_disk)} on disk")
    return ", ".join(parts)


def _verified(verified: Any) -> Cell:
    if verified is None:
        return Text("not now; --verify reads every byte", FAINT)
    return Text("every byte, just now", GOOD) if verified else Text("no: see the error", BAD)


def _encrypted(encrypted: dict[str, Any] | None) -> Cell:
    if encrypted is None:
        return ""
    if encrypted.get("opened"):
        return Text("yes, and opened", GOOD)
    return Text("yes: names, arguments, files and memory are sealed; --identity FILE shows them", UNSURE)


def _signed(signed: dict[str, Any] | None) -> Cell:
    if signed is None:
        return ""
    if signed.get("key") is None:
        return Text("the signature does not fit: this is not what was signed", BAD)
    key = words.safe(signed["key"])
    if signed.get("principal") is None:
        return f"with {key}; --allowed-signers FILE says whose that is"
    return Text(f"by {words.safe(signed['principal'])}, with {key}", GOOD)


def _lineage(manifest: Manifest) -> str:
    parent = manifest.lineage.parent_image_id
    return f"generation {manifest.lineage.generation}" + (f", restored from image {parent}" if parent else "")


def add_origin(sheet: Sheet, manifest: Manifest) -> None:
    """The host and the programs that made the image, and what a restore repeats of the dump."""
    host, criu = manifest.host, manifest.criu
    sheet.heading("Made by", host.hostname)
    sheet.facts(
        (
            ("system", f"{host.os}, kernel {host.kernel}, {host.machine}, glibc {host.glibc or '?'}"),
            ("CPU", f"{host.cpu.model}, {words.count(host.cpu.cores, 'core')}"),
            ("memory", words.size(host.memory_total_bytes)),
            ("GPU driver", f"{host.gpu.version}, CUDA {host.gpu.cuda_version or '?'}" if host.gpu.version else ""),
            ("gpuckpt", f"{manifest.gpuckpt}, Python {host.python}"),
            ("CRIU", f"{criu.version}, run {criu.run_id}"),
            ("format", f"{manifest.format}: {', '.join(manifest.requires)}"),
            ("network lock", criu.network_lock),
            ("connections", manifest.tcp),
            ("file locks", "kept" if criu.file_locks else ""),
            ("terminal", "a job of one" if criu.shell_job else ""),
            ("LSM", criu.lsm),
            ("outside", ", ".join(criu.external)),
        )
    )


def add_parts(sheet: Sheet, manifest: Manifest) -> None:
    """What takes the room."""
    groups: dict[str, list[Part]] = {}
    for part in manifest.parts:
        groups.setdefault(_group(part.path), []).append(part)
    sizes = {name: sum(part.size for part in parts) for name, parts in groups.items()}
    largest = max(sizes.values(), default=0) or 1
    rows = [
        (
            name,
            str(len(groups[name])),
            words.size(total),
            Text(bar(total / largest, BAR_WIDTH, unicode=sheet.unicode), "blue"),
        )
        for name, total in sorted(sizes.items(), key=lambda item: -item[1])
    ]
    sheet.heading("Parts", words.count(len(manifest.parts), "file"))
    sheet.table("PART >FILES >SIZE SHARE", rows, wrap=False)


def add_captured(sheet: Sheet, manifest: Manifest) -> None:
    """Files of the host that lie in the image."""
    if not manifest.captured:
        return
    sizes = {part.path: part.size for part in manifest.parts}
    total = sum(sizes.get(part, 0) for part in {one.part for one in manifest.captured})
    rows = [(words.size(sizes.get(one.part)), one.reason, one.path) for one in manifest.captured]
    sheet.heading("Captured files", f"{len(rows)}, {words.size(total)}")
    sheet.table(">SIZE WHY PATH", rows)


def _group(path: str) -> str:
    name = path.rpartition("/")[2]
    if path.startswith("packs/") or name.startswith("pages-"):
        return "memory"
    return "captured files" if path.startswith("files/") else "process state"


def add_timings(sheet: Sheet, manifest: Manifest) -> None:
    """How long each phase of the dump took."""
    known = [phase for phase in PHASES if phase in manifest.seconds]
    phases = [*known, *sorted(set(manifest.seconds).difference(known))]
    longest = max(manifest.seconds.values(), default=0.0) or 1.0
    rows = []
    for phase in phases:
        seconds = manifest.seconds[phase]
        picture = Text(bar(seconds / longest, BAR_WIDTH, unicode=sheet.unicode), "blue")
        rows.append((phase, words.duration(seconds), words.rate(_bytes(manifest, phase), seconds), picture))
    note = (
        f"frozen {words.duration(manifest.frozen_seconds)}, of that stopped {words.duration(manifest.stopped_seconds)}"
    )
    sheet.heading("Dump", note)
    sheet.table("PHASE >TIME >RATE SHARE", rows, wrap=False)


def _bytes(manifest: Manifest, phase: str) -> int | None:
    if phase == "capture":
        return manifest.bytes_raw
    if phase == "gpu_to_host":
        return sum(sum(process.gpu_memory_bytes.values()) for process in manifest.cuda)
    return None

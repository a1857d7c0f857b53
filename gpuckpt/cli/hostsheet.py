"""The screen for a host: what it can do, what it lacks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.text import Text

from gpuckpt.cli import words
from gpuckpt.cli.sheet import BAD, GOOD, UNSURE, Cell, Sheet
from gpuckpt.model.facts import Gpu, Host

INTERFACES = {
    "api": "checkpoints by the driver's API",
    "program": "checkpoints by cuda-checkpoint",
    "none": "no checkpoints",
}


def host_verdict(can: dict[str, Any]) -> Text:
    """What this host can do, in one line."""
    able = [verb for verb in ("dump", "restore") if can.get(verb)]
    if not able:
        return Text("can neither dump nor restore as it is", BAD)
    gpu = "with GPU state" if can.get("gpu") else "without GPU state"
    return Text(f"can {' and '.join(able)}, {gpu}", GOOD if len(able) == 2 else UNSURE)


def add_host(sheet: Sheet, host: Host, can: dict[str, Any]) -> None:
    """What it can do and what it is."""
    sheet.heading("Can")
    rows = [
        (_mark(can.get("dump")), "dump", _criu(host)),
        (_mark(can.get("restore")), "restore", _cgroup(host)),
        (_mark(can.get("gpu")), "GPU state", _driver(host)),
    ]
    sheet.table("ABLE WHAT WITH", rows)
    add_host_facts(sheet, host)
    if host.gpu.gpus:
        add_gpus(sheet, host)


def add_host_facts(sheet: Sheet, host: Host) -> None:
    """System, memory, settings."""
    sheet.heading("Is")
    sheet.facts(_facts(host))


def add_gpus(sheet: Sheet, host: Host) -> None:
    """Every GPU with what is free on it."""
    version = f"driver {host.gpu.version or '?'}, CUDA {host.gpu.cuda_version or '?'}"
    sheet.heading("GPUs", version if host.gpu.gpus else host.gpu.problem or "none")
    sheet.table(">GPU MODEL >FREE >MEMORY NOTES", [_gpu(gpu) for gpu in host.gpu.gpus])


def _mark(able: Any) -> Text:
    return Text("yes", GOOD) if able else Text("no", BAD)


def _criu(host: Host) -> str:
    if host.criu.path is None:
        return host.criu.problem or "CRIU was not found"
    verdict = {True: "passes `criu check`", False: "fails `criu check`", None: "not tried"}[host.criu.check_ok]
    said = host.criu.check_output.strip().splitlines()
    why = f": {said[-1]}" if host.criu.check_ok is False and said else ""
    return f"CRIU {host.criu.version or '?'} at {host.criu.path}, {host.criu.problem or verdict}{why}"


def _cgroup(host: Host) -> str:
    places = {"systemd": "a systemd scope of their own", "v2": "a cgroup of their own", "none": "the cgroup of gpuckpt"}
    return f"restored trees live in {places[host.cgroup]}"


def _driver(host: Host) -> str:
    if host.gpu.version is None:
        return host.gpu.problem or "no NVIDIA driver"
    program = f" ({host.gpu.program})" if host.gpu.interface == "program" and host.gpu.program else ""
    return f"driver {host.gpu.version}: {host.gpu.problem or INTERFACES[host.gpu.interface]}{program}"


def _facts(host: Host) -> Iterator[tuple[str, Cell]]:
    yield "system", f"{host.os}, kernel {host.kernel}, {host.machine}, glibc {host.glibc or '?'}"
    yield "CPU", f"{host.cpu.model}, {words.count(host.cpu.cores, 'core')}"
    yield "memory", f"{words.size(host.memory_available_bytes)} of {words.size(host.memory_total_bytes)} free"
    yield "disk", f"{words.size(host.image_space_bytes)} free for images" if host.image_space_bytes is not None else ""
    yield "network lock", host.criu.network_lock if host.criu.path else ""
    yield "huge pages", host.transparent_huge_pages or ""
    yield "privilege", _privilege(host)
    yield "up", words.duration(host.uptime_seconds) if host.uptime_seconds else ""
    yield "gpuckpt", f"{host.gpuckpt}, Python {host.python}"


def _privilege(host: Host) -> Cell:
    if host.privileged and not host.missing_capabilities:
        return "root"
    missing = ", ".join(host.missing_capabilities)
    return Text(f"lacks {missing}" if missing else "not root", BAD)


def _gpu(gpu: Gpu) -> tuple[Cell, ...]:
    free, total = words.size(gpu.memory_free_bytes), words.size(gpu.memory_total_bytes)
    return str(gpu.index), gpu.name, free, total, Text(", ".join(_gpu_notes(gpu)))


def _gpu_notes(gpu: Gpu) -> Iterator[str]:
    if gpu.problem:
        yield words.safe(gpu.problem)
    if gpu.mig_enabled:
        yield "MIG on: no checkpoints"
    if gpu.persistence_mode is False:
        yield "persistence mode off"
    if gpu.compute_pids:
        yield f"used by {', '.join(map(str, gpu.compute_pids))}"

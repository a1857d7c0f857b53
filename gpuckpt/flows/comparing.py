"""inspect --diff and --memory: how two images differ, and what the memory of one consists of."""

from __future__ import annotations

import datetime as dt
from typing import TYPE_CHECKING

from gpuckpt.checks.check import size
from gpuckpt.flows.leandir import PACKS, is_packed
from gpuckpt.images import memorykinds
from gpuckpt.images.packindex import read_index
from gpuckpt.model.inspection import Comparison, Difference, MemoryPicture

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from gpuckpt.images.memorykinds import Piece
    from gpuckpt.images.packindex import Index
    from gpuckpt.model.facts import OpenFile, Process, Socket
    from gpuckpt.model.manifest import Manifest
    from gpuckpt.stores.directory import Image

    Named = dict[str, str]
    Going = Callable[[], None]


def picture(image: Image, going_on: Going) -> MemoryPicture:
    """What the memory of an image consists of. Raises ImageCorrupt, ImageTooNew, and what `going_on` raises."""
    index = _index(image)
    raw = index.raw_bytes() if index is not None else image.manifest.bytes_raw
    return memorykinds.picture(_pieces(image, index, going_on), raw)


def compare(image: Image, other: Image, going_on: Going) -> Comparison:
    """How `image` differs from `other`. Raises ImageCorrupt, ImageTooNew, and what `going_on` raises."""
    memory = memorykinds.changes(_pieces(image, _index(image), going_on), _pieces(other, _index(other), going_on))
    there = other.manifest
    differences = tuple(all_differences(image.manifest, there))
    return Comparison(str(other.path), there.image_id, there.created, differences, memory)


def _index(image: Image) -> Index | None:
    return read_index(image.part(PACKS) / "index") if is_packed(image) else None


def _pieces(image: Image, index: Index | None, going_on: Going) -> Iterator[Piece]:
    on_gpu = {one.id.pid: sum(one.gpu_memory_bytes.values()) for one in image.manifest.cuda}
    return memorykinds.pieces(image.part("criu"), index.files if index else None, on_gpu, going_on)


def all_differences(here: Manifest, other: Manifest) -> Iterator[Difference]:
    """What two manifests do not have alike, beside the memory: group by group, each in order of its names."""
    for group, told in _GROUPS.items():
        mine, theirs = told(here), told(other)
        for name in sorted({*mine, *theirs}):
            if mine.get(name, "") != theirs.get(name, ""):
                yield Difference(group, name, theirs.get(name, ""), mine.get(name, ""))


def _image(manifest: Manifest) -> Named:
    after = "went on" if manifest.left_running else "ended"
    return {
        "memory": size(manifest.bytes_raw),
        "stored": size(manifest.bytes_stored),
        "captured files": str(len(manifest.captured)),
        "generation": str(manifest.lineage.generation),
        "connections": manifest.tcp,
        "tree after the dump": after,
        "frozen": f"{manifest.frozen_seconds:.2f} s",
    }


def _versions(manifest: Manifest) -> Named:
    host = manifest.host
    engines = {engine.name: " ".join(filter(None, (engine.version, engine.model))) for engine in manifest.tree.engines}
    return {
        "host": host.hostname,
        "system": host.os,
        "kernel": host.kernel,
        "glibc": host.glibc or "",
        "CPU": host.cpu.model,
        "gpuckpt": manifest.gpuckpt,
        "CRIU": manifest.criu.version,
        "image format": str(manifest.format),
        "GPU driver": host.gpu.version or "",
        "CUDA": host.gpu.cuda_version or "",
        **engines,
    }


def _processes(manifest: Manifest) -> Named:
    return {f"{one.pid} {one.comm}": _process(one) for one in manifest.tree.processes}


def _process(process: Process) -> str:
    return f"{size(process.rss_bytes)} resident, {len(process.threads)} threads, user {process.uid}"


def _files(manifest: Manifest) -> Named:
    return {file.path: _file(file) for file in manifest.tree.files}


def _file(file: OpenFile) -> str:
    changed = dt.datetime.fromtimestamp(min(max(file.mtime, 0.0), 2.0**36), dt.timezone.utc)
    return f"{size(file.size)}, written {changed:%Y-%m-%d %H:%M:%S}{', deleted' if file.deleted else ''}"


def _sockets(manifest: Manifest) -> Named:
    named = (socket for socket in manifest.tree.sockets if socket.local or socket.remote)
    return {_ends(socket): f"{socket.family} {socket.type} {socket.state}" for socket in named}


def _ends(socket: Socket) -> str:
    return f"{socket.local} -> {socket.remote}" if socket.remote else socket.local


def _gpus(manifest: Manifest) -> Named:
    names = {gpu.uuid: f"{gpu.name} {gpu.uuid}" for gpu in manifest.host.gpu.gpus}
    uses = manifest.tree.gpu_uses
    return {
        names.get(uuid, uuid): ", ".join(
            f"{size(use.memory_bytes) if use.memory_bytes is not None else '?'} by {use.pid}"
            for use in uses
            if use.gpu_uuid == uuid
        )
        for uuid in {use.gpu_uuid for use in uses}
    }


def _environment(manifest: Manifest) -> Named:
    processes = manifest.tree.processes
    return {f"{name} of {one.pid}": "set" for one in processes for name in one.environment_names} | {
        f"directory of {one.pid}": one.cwd for one in processes
    }


_GROUPS: dict[str, Callable[[Manifest], Named]] = {
    "image": _image,
    "versions": _versions,
    "processes": _processes,
    "GPUs": _gpus,
    "files": _files,
    "sockets": _sockets,
    "environment": _environment,
}

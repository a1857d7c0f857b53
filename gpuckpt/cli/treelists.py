"""The lists of a process tree, each asked for by its option: files, sockets, GPUs, environment."""

from __future__ import annotations

import os
from collections.abc import Iterator

from rich.text import Text

from gpuckpt.checks.objects import restore_needs
from gpuckpt.cli import words
from gpuckpt.cli.sheet import BAD, UNSURE, Cell, Sheet
from gpuckpt.model.facts import Host, OpenFile, Process, Socket, Tree

STDIO_NAMES = ("stdin", "stdout", "stderr")


def add_files(sheet: Sheet, tree: Tree) -> None:
    """Open and mapped files, those that are written first."""
    files = sorted(tree.files, key=lambda file: (not is_written(file), not file.deleted, not _opened(file), file.path))
    written, deleted = sum(map(is_written, files)), sum(file.deleted for file in files)
    notes = [str(len(files)), f"{written} written" if written else "", f"{deleted} deleted" if deleted else ""]
    sheet.heading("Files", ", ".join(filter(None, notes)))
    sheet.table(">SIZE USE PATH", [(words.size(file.size), _use(file), file.path) for file in files])


def is_written(file: OpenFile) -> bool:
    """Open for writing, or mapped so that writes go into it."""
    opened_to_write = file.flags is not None and file.flags & os.O_ACCMODE in (os.O_WRONLY, os.O_RDWR)
    return opened_to_write or any(use.endswith("shared-write") for use in file.uses)


def _opened(file: OpenFile) -> bool:
    return any(" fd " in use for use in file.uses)


def _use(file: OpenFile) -> Text:
    kinds = {use.split(" ")[1] for use in file.uses if " " in use}
    text = Text("write" if is_written(file) else "read" if "fd" in kinds else next(iter(sorted(kinds)), "-"))
    if file.deleted:
        text.append(" deleted", UNSURE)
    return text


def add_sockets(sheet: Sheet, tree: Tree) -> None:
    """Sockets, pipes, and stdio that leaves the tree."""
    if not (tree.sockets or tree.pipes or tree.outside_stdio):
        sheet.heading("Sockets", "none, and no pipes")
    _add_sockets(sheet, tree)
    _add_pipes(sheet, tree)
    _add_stdio(sheet, tree)


def _add_sockets(sheet: Sheet, tree: Tree) -> None:
    if not tree.sockets:
        return
    sockets = sorted(tree.sockets, key=lambda socket: (socket.inside, socket.family, socket.local))
    outside = sum(not socket.inside for socket in sockets)
    sheet.heading("Sockets", f"{len(sockets)}, {outside} leave the tree" if outside else str(len(sockets)))
    rows = [
        (_socket_kind(socket), socket.state or "-", _short_list(socket.owners), _ends(socket)) for socket in sockets
    ]
    sheet.table("KIND STATE HELD ENDS", rows)


def _socket_kind(socket: Socket) -> str:
    if socket.family in ("inet", "inet6"):
        name = {"stream": "tcp", "dgram": "udp"}.get(socket.type, socket.type)
        return f"{name}6" if socket.family == "inet6" else name
    return f"{socket.family} {socket.type}".strip()


def _ends(socket: Socket) -> Text:
    text = Text(words.safe(socket.local or "-"))
    if socket.remote:
        text.append(f" -> {words.safe(socket.remote)}")
    if not socket.inside:
        text.append(f"  leaves the tree{f' to {words.safe(socket.peer)}' if socket.peer else ''}", UNSURE)
    return text


def _short_list(owners: tuple[str, ...]) -> str:
    return owners[0] + (f" +{len(owners) - 1}" if len(owners) > 1 else "") if owners else "-"


def _add_pipes(sheet: Sheet, tree: Tree) -> None:
    if not tree.pipes:
        return
    outside = [pipe for pipe in tree.pipes if not pipe.inside]
    inside = len(tree.pipes) - len(outside)
    sheet.heading("Pipes", f"{inside} inside the tree" + (f", {len(outside)} leave it" if outside else ""))
    sheet.table(
        "HELD OTHER-END", [(_short_list(p.owners), Text(words.safe(p.peer or "unknown"), UNSURE)) for p in outside]
    )


def _add_stdio(sheet: Sheet, tree: Tree) -> None:
    if not tree.outside_stdio:
        return
    sheet.heading("Stdio", f"leaves the tree: restore needs {restore_needs(tree)}")
    rows = []
    for end in tree.outside_stdio:
        name = STDIO_NAMES[end.fd] if end.fd < 3 else str(end.fd)
        rows.append(
            (
                name,
                end.kind,
                _short_list(end.holders),
                Text(words.safe(end.peer or end.key), BAD if not end.peer else ""),
            )
        )
    sheet.table("END KIND HELD OTHER-END", rows)


def gpu_bytes(tree: Tree) -> dict[int, int | None]:
    """Process -> its GPU memory; None where it is not known."""
    total: dict[int, int | None] = {}
    for use in tree.gpu_uses:
        before = total.get(use.pid, 0)
        total[use.pid] = None if use.memory_bytes is None or before is None else before + use.memory_bytes
    return total


def gpu_rows(tree: Tree, host: Host) -> list[tuple[str, str, str, str, str]]:
    """Each GPU that the tree uses: index, model, memory, by whom it is used, UUID."""
    by_gpu: dict[str, list[str]] = {}
    for use in tree.gpu_uses:
        by_gpu.setdefault(use.gpu_uuid, []).append(f"{words.size(use.memory_bytes)} by {use.pid}")
    known = {gpu.uuid: gpu for gpu in host.gpu.gpus}
    rows = []
    for uuid, uses in by_gpu.items():
        gpu = known.get(uuid)
        name = (str(gpu.index), gpu.name, words.size(gpu.memory_total_bytes)) if gpu else ("?", "?", "?")
        rows.append((*name, ", ".join(uses), uuid))
    return rows


def add_gpus(sheet: Sheet, tree: Tree, host: Host) -> None:
    """The GPUs in use, and the CUDA processes."""
    if not (tree.gpu_uses or tree.cuda):
        sheet.heading("GPUs", "none is used")
        return
    cuda = f"{words.count(len(tree.cuda), 'CUDA process', 'CUDA processes')}"
    sheet.heading("GPUs", f"driver {host.gpu.version or '?'}, CUDA {host.gpu.cuda_version or '?'}, {cuda}")
    sheet.table(">GPU MODEL >MEMORY USED UUID", gpu_rows(tree, host), wrap=False)
    used = gpu_bytes(tree)
    rows = [(str(one.id.pid), one.state, str(one.restore_tid), words.size(used.get(one.id.pid))) for one in tree.cuda]
    sheet.heading("CUDA processes")
    sheet.table(">PID STATE >RESTORE-THREAD GPU-MEMORY", rows, wrap=False)


def add_job_environment(sheet: Sheet, tree: Tree) -> None:
    """What each process was started with and in. Of variables the names are known, never the values."""
    weights = [path for engine in tree.engines for path in engine.weight_files]
    if weights:
        sheet.heading("Weights", words.count(len(weights), "file"))
        sheet.table("PATH", [(path,) for path in weights])
    for same, pids in _alike(tree):
        sheet.heading("Environment", f"of {', '.join(map(str, pids))}")
        sheet.facts(_surroundings(same))


def _alike(tree: Tree) -> list[tuple[Process, list[int]]]:
    """Processes that differ in nothing of their environment, told once."""
    found: dict[object, tuple[Process, list[int]]] = {}
    for one in tree.processes:
        key = (one.uid, one.gid, one.cwd, one.root, one.cgroup, one.environment_names, *sorted(one.namespaces.items()))
        found.setdefault(key, (one, []))[1].append(one.pid)
    return list(found.values())


def _surroundings(process: Process) -> Iterator[tuple[str, Cell]]:
    yield "user", f"{process.uid}, group {process.gid}"
    yield "directory", process.cwd
    yield "root", process.root if process.root != "/" else ""
    yield "program", process.exe
    yield "cgroup", process.cgroup
    yield "namespaces", ", ".join(process.namespaces.values())
    yield "variables", " ".join(process.environment_names)

"""The parts of a screen that show a process tree: the same for an image and for running processes."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator

from rich.text import Text

from gpuckpt.checks.objects import restore_needs
from gpuckpt.cli import words
from gpuckpt.cli.sheet import BAD, FAINT, UNSURE, Cell, Sheet
from gpuckpt.model.facts import Engine, Host, OpenFile, Process, Socket, Surroundings, Tree

LONGEST_COMMAND = 2000
STDIO_NAMES = ("stdin", "stdout", "stderr")


def tree_facts(tree: Tree) -> Iterator[tuple[str, Cell]]:
    """What the job is and who started it."""
    yield "job", "; ".join(_engine(engine) for engine in tree.engines)
    weights = [path for engine in tree.engines for path in engine.weight_files]
    yield "weights", _first_of(weights)
    yield "under", ", ".join(_supervisors(tree.surroundings))


def _engine(engine: Engine) -> str:
    return " ".join(filter(None, (engine.name, engine.version, f"with {engine.model}" if engine.model else "")))


def _first_of(paths: list[str]) -> str:
    if not paths:
        return ""
    return paths[0] + (f" and {words.count(len(paths) - 1, 'more file')}" if len(paths) > 1 else "")


def _supervisors(around: Surroundings) -> Iterator[str]:
    if around.slurm_job_id:
        yield f"Slurm job {around.slurm_job_id}" + (f" step {around.slurm_step_id}" if around.slurm_step_id else "")
    if around.systemd_unit:
        yield around.systemd_unit + (f" (Restart={around.systemd_restart})" if around.systemd_restart else "")
    if around.container_id:
        yield f"{around.container_runtime or 'container'} {around.container_id[:12]}"
    if around.has_terminal:
        yield "a terminal"


def add_tree(sheet: Sheet, tree: Tree, host: Host) -> None:
    """Processes, GPUs, files, sockets, pipes and stdio of a tree."""
    _add_processes(sheet, tree)
    _add_gpus(sheet, tree, host)
    _add_files(sheet, tree)
    _add_sockets(sheet, tree)
    _add_pipes(sheet, tree)
    _add_stdio(sheet, tree)


def _add_processes(sheet: Sheet, tree: Tree) -> None:
    threads = sum(len(process.threads) for process in tree.processes)
    resident = sum(process.rss_bytes for process in tree.processes)
    note = [words.count(len(tree.processes), "process", "processes"), words.count(threads, "thread")]
    sheet.heading("Processes", ", ".join([*note, f"{words.size(resident)} resident"]))
    gpu = _gpu_bytes(tree)
    suspended = {process.id.pid for process in tree.cuda}
    rows = []
    for process, indent in _nested(tree, unicode=sheet.unicode):
        memory = words.size(gpu[process.pid]) if process.pid in gpu else ("CUDA" if process.pid in suspended else "-")
        numbers = (str(process.pid), str(process.uid), process.state, str(len(process.threads)))
        rows.append((*numbers, words.size(process.rss_bytes), memory, _command(process, indent)))
    sheet.table(">PID >UID S >THR >RSS >GPU COMMAND", rows, wrap=False)


def _gpu_bytes(tree: Tree) -> dict[int, int | None]:
    total: dict[int, int | None] = {}
    for use in tree.gpu_uses:
        before = total.get(use.pid, 0)
        total[use.pid] = None if use.memory_bytes is None or before is None else before + use.memory_bytes
    return total


def _command(process: Process, indent: str) -> Text:
    command = (
        " ".join(shlex.quote(words.safe(argument)) for argument in process.argv) or f"[{words.safe(process.comm)}]"
    )
    return Text.assemble((indent, FAINT), words.shorten(command, LONGEST_COMMAND))


def _nested(tree: Tree, *, unicode: bool) -> Iterator[tuple[Process, str]]:
    """Each process with the guides that lead to it. A parent that is not in the tree makes a root."""
    children: dict[int, list[Process]] = {}
    pids = set(tree.pids)
    for process in tree.processes:
        parent = process.ppid if process.ppid in pids and process.pid != tree.root.pid else 0
        children.setdefault(parent, []).append(process)
    tee, end, down = ("├─ ", "└─ ", "│  ") if unicode else ("|- ", "`- ", "|  ")
    waiting = [(process, "", "") for process in reversed(children.pop(0, []))]
    while waiting:
        process, own, below = waiting.pop()
        yield process, own
        family = children.pop(process.pid, [])
        for number, child in reversed(list(enumerate(family, 1))):
            last = number == len(family)
            waiting.append((child, below + (end if last else tee), below + ("   " if last else down)))


def _add_gpus(sheet: Sheet, tree: Tree, host: Host) -> None:
    if not (tree.gpu_uses or tree.cuda):
        return
    by_gpu: dict[str, list[str]] = {}
    for use in tree.gpu_uses:
        by_gpu.setdefault(use.gpu_uuid, []).append(f"{words.size(use.memory_bytes)} by {use.pid}")
    known = {gpu.uuid: gpu for gpu in host.gpu.gpus}
    rows = []
    for uuid, uses in by_gpu.items():
        gpu = known.get(uuid)
        name = (str(gpu.index), gpu.name, words.size(gpu.memory_total_bytes)) if gpu else ("?", "?", "?")
        rows.append((*name, ", ".join(uses), uuid))
    driver = f"driver {host.gpu.version or '?'}, {words.count(len(tree.cuda), 'CUDA process', 'CUDA processes')}"
    sheet.heading("GPUs", driver)
    sheet.table(">GPU MODEL >MEMORY USED UUID", rows, wrap=False)


def _add_files(sheet: Sheet, tree: Tree) -> None:
    if not tree.files:
        return
    files = sorted(tree.files, key=lambda file: (not _written(file), not file.deleted, not _opened(file), file.path))
    written, deleted = sum(map(_written, files)), sum(file.deleted for file in files)
    notes = [str(len(files)), f"{written} written" if written else "", f"{deleted} deleted" if deleted else ""]
    shown = files if sheet.all_lines else [file for file in files if not _only_mapped(file)]
    hidden = f"{len(files) - len(shown)} mapped only (--verbose)" if len(shown) < len(files) else ""
    sheet.heading("Files", ", ".join(filter(None, [*notes, hidden])))
    sheet.table(">SIZE USE PATH", [(words.size(file.size), _use(file), file.path) for file in shown])


def _only_mapped(file: OpenFile) -> bool:
    return not (_written(file) or file.deleted) and all(use.endswith((" map", " map exec")) for use in file.uses)


def _written(file: OpenFile) -> bool:
    opened_to_write = file.flags is not None and file.flags & os.O_ACCMODE in (os.O_WRONLY, os.O_RDWR)
    return opened_to_write or any(use.endswith("shared-write") for use in file.uses)


def _opened(file: OpenFile) -> bool:
    return any(" fd " in use for use in file.uses)


def _use(file: OpenFile) -> Text:
    kinds = {use.split(" ")[1] for use in file.uses if " " in use}
    text = Text("write" if _written(file) else "read" if "fd" in kinds else next(iter(sorted(kinds)), "-"))
    if file.deleted:
        text.append(" deleted", UNSURE)
    return text


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

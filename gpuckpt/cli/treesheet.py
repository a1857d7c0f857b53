"""What a screen says of a process tree first: the job in a few facts, its processes. The lists are in treelists.py."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from rich.text import Text

from gpuckpt.checks.objects import restore_needs
from gpuckpt.cli import words
from gpuckpt.cli.sheet import FAINT, Cell, Sheet
from gpuckpt.cli.treelists import gpu_bytes, gpu_rows, is_written
from gpuckpt.model.facts import Engine, Host, Process, Surroundings, Tree

LONGEST_COMMAND = 2000


def tree_facts(tree: Tree, host: Host, *, captured: int = 0, tcp: str = "") -> Iterator[tuple[str, Cell]]:
    """What the job is, who started it, and what it holds, a line each; `tcp` says what a dump did with connections."""
    yield "job", "; ".join(_engine(engine) for engine in tree.engines)
    yield "under", ", ".join(_supervisors(tree.surroundings))
    for index, model, _total, used, _uuid in gpu_rows(tree, host):
        yield f"GPU {index}", f"{model}: {used}"
    yield "files", _files(tree, captured)
    yield "sockets", _sockets(tree, tcp)
    yield "stdio", f"leaves the tree: restore needs {restore_needs(tree)}" if tree.outside_stdio else ""


def _files(tree: Tree, captured: int) -> str:
    written, deleted = sum(map(is_written, tree.files)), sum(file.deleted for file in tree.files)
    counts = ((written, "written"), (deleted, "deleted"), (captured, "saved in the image"))
    return ", ".join([f"{len(tree.files)} open or mapped", *(f"{number} {what}" for number, what in counts if number)])


def _sockets(tree: Tree, tcp: str) -> str:
    if not tree.sockets:
        return ""
    outside = sum(not socket.inside for socket in tree.sockets)
    leave = f", {outside} leave{'s' if outside == 1 else ''} the tree" if outside else ""
    return f"{len(tree.sockets)}{leave}{f': {tcp}' if outside and tcp else ''}"


def _engine(engine: Engine) -> str:
    return " ".join(filter(None, (engine.name, engine.version, f"with {engine.model}" if engine.model else "")))


def _supervisors(around: Surroundings) -> Iterator[str]:
    if around.slurm_job_id:
        yield f"Slurm job {around.slurm_job_id}" + (f" step {around.slurm_step_id}" if around.slurm_step_id else "")
    if around.systemd_unit:
        yield around.systemd_unit + (f" (Restart={around.systemd_restart})" if around.systemd_restart else "")
    if around.container_id:
        yield f"{around.container_runtime or 'container'} {around.container_id[:12]}"
    if around.has_terminal:
        yield "a terminal"


def add_processes(sheet: Sheet, tree: Tree) -> None:
    """The tree, with what each process holds."""
    threads = sum(len(process.threads) for process in tree.processes)
    resident = sum(process.rss_bytes for process in tree.processes)
    note = [words.count(len(tree.processes), "process", "processes"), words.count(threads, "thread")]
    sheet.heading("Processes", ", ".join([*note, f"{words.size(resident)} resident"]))
    gpu = gpu_bytes(tree)
    suspended = {process.id.pid for process in tree.cuda}
    rows = []
    for process, indent in _nested(tree, unicode=sheet.unicode):
        memory = words.size(gpu[process.pid]) if process.pid in gpu else ("CUDA" if process.pid in suspended else "-")
        numbers = (str(process.pid), str(process.uid), process.state, str(len(process.threads)))
        rows.append((*numbers, words.size(process.rss_bytes), memory, _command(process, indent)))
    sheet.table(">PID >UID S >THR >RSS >GPU COMMAND", rows, wrap=False)


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

"""What a dump asks for: the order to the owner, and CRIU's options."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpuckpt.checks.facts import address_of, outside_connections
from gpuckpt.flows.gather import LOOPBACK
from gpuckpt.model import manifest as manifests
from gpuckpt.model.manifest import CriuOptions
from gpuckpt.owner.messages import CudaMember, DumpOrder, TreeOrder
from gpuckpt.system import criu

if TYPE_CHECKING:
    from pathlib import Path

    from gpuckpt.checks.facts import DumpFacts
    from gpuckpt.model.facts import Tree
    from gpuckpt.model.requests import DumpRequest
    from gpuckpt.owner.runs import Run


def order(
    request: DumpRequest, facts: DumpFacts, run: Run, images: Path, left_seconds: float | None, *, stream: bool
) -> DumpOrder:
    """The order of a dump; `images` is CRIU's images directory."""
    tree = facts.tree
    return DumpOrder(
        run_directory=str(run.directory),
        tree=TreeOrder(tree.root, tree.ids, tree.stopped, members(tree)),
        criu=facts.host.criu.path or "",
        images=str(images),
        options=criu_options(facts, run_id="", lsm=""),
        leave_running=request.leave_running,
        keep_network_lock=request.tcp == "keep",
        kept_addresses=_kept_addresses(tree) if request.tcp == "keep" else (),
        lock_timeout_ms=round(request.lock_timeout_seconds * 1000),
        deadline_seconds=left_seconds,
        force_program=request.force_program,
        stream=stream,
        huge_pages=request.huge_pages,
        driver=facts.host.gpu,
    )


def _kept_addresses(tree: Tree) -> tuple[str, ...]:
    found = (address_of(socket.local) for socket in outside_connections(tree))
    return tuple(dict.fromkeys(address for address in found if not address.startswith(LOOPBACK)))


def criu_options(facts: DumpFacts, *, run_id: str, lsm: str) -> CriuOptions:
    """What CRIU is told at the dump, and what a restore must repeat."""
    tree, program = facts.tree, facts.host.criu
    inet = any(socket.family in ("inet", "inet6") and socket.type == "stream" for socket in tree.sockets)
    around = tree.surroundings
    return CriuOptions(
        version=program.version or "",
        run_id=run_id,
        shell_job=not around.session_leader_inside,
        tcp_established=inet,
        network_lock=program.network_lock,
        file_locks=tree.file_locks,
        ghost_limit_bytes=manifests.GHOST_LIMIT_BYTES,
        ext_unix_sockets=any(socket.family == "unix" and not socket.inside for socket in tree.sockets),
        external=tuple(_external_keys(tree)),
        cpu_cap=criu.CPU_CAP,
        lsm=lsm,
    )


def members(tree: Tree) -> tuple[CudaMember, ...]:
    """The CUDA processes of a tree, for the owner."""
    return tuple(
        CudaMember(
            one.id,
            one.restore_tid,
            {use.gpu_uuid: use.memory_bytes for use in tree.gpu_uses if use.pid == one.id.pid and use.memory_bytes},
        )
        for one in tree.cuda
    )


def _external_keys(tree: Tree) -> list[str]:
    """--external for stdio that leads outside.

    A stream socket, for CRIU refuses half a pair otherwise; and a terminal where the root leads its session, for
    only an external one becomes its controlling terminal again. A job within another's session joins the
    restorer's, with its terminal (--shell-job).
    """
    sockets = [f"unix[{stdio.key[8:-1]}]" for stdio in tree.outside_stdio if stdio.kind == "socket"]
    if not tree.surroundings.session_leader_inside:
        return sockets
    return sockets + [stdio.key for stdio in tree.outside_stdio if stdio.kind == "tty"]

"""Facts for the tests of checks: a quiet CPU job and a GPU job, as seen on real machines (H200, driver 580.159.04)."""

from __future__ import annotations

import stat
import zlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gpuckpt.checks import DUMP_CHECKS, RESTORE_CHECKS, DumpFacts, RestoreFacts
from gpuckpt.model.facts import (
    Cpu,
    CriuProgram,
    CudaProcess,
    Descriptor,
    Gpu,
    GpuDriver,
    GpuUse,
    Host,
    OpenFile,
    Process,
    ProcessId,
    Socket,
    Stdio,
    Surroundings,
    Tree,
)
from gpuckpt.model.manifest import CriuOptions, CudaSuspension, Lineage, Manifest
from gpuckpt.model.report import Finding
from gpuckpt.model.requests import DumpRequest, RestoreRequest

GIB = 1 << 30
NAMESPACES = {
    "pid": "pid:[4026531836]",
    "mnt": "mnt:[4026531832]",
    "net": "net:[4026531833]",
    "time": "time:[4026531834]",
}
FLAGS = ("fpu", "cx8", "sse4_2", "avx2", "avx512f", "amx_tile", "md_clear", "erms")

GPU0 = Gpu(0, "GPU-aaaa", "NVIDIA H200", 140 * GIB, 120 * GIB, "00000000:18:00.0", 0, False, True, (1000,))
GPU1 = Gpu(1, "GPU-bbbb", "NVIDIA H200", 140 * GIB, 139 * GIB, "00000000:2A:00.0", 1, False, True, ())
DRIVER = GpuDriver("580.159.04", "13.0", "api", None, (GPU0, GPU1))
CRIU = CriuProgram("/usr/sbin/criu", "4.3", True, "", "nftables")
HOST = Host(
    hostname="node1",
    kernel="6.18.5",
    machine="x86_64",
    os="Debian GNU/Linux 13",
    glibc="2.41",
    cpu=Cpu("Intel(R) Xeon(R) Platinum 8481C", "GenuineIntel", FLAGS, 16),
    memory_total_bytes=128 * GIB,
    memory_available_bytes=100 * GIB,
    privileged=True,
    missing_capabilities=(),
    criu=CRIU,
    gpu=DRIVER,
    cgroup="v2",
    python="3.11.7",
    gpuckpt="0.1.0",
)


def process(pid: int = 1000, **changes: Any) -> Process:
    base = Process(
        id=ProcessId(pid, 5000 + pid),
        ppid=1,
        pgid=1000,
        sid=1000,
        comm="python",
        argv=("python", "job.py"),
        exe="/usr/bin/python3",
        cwd="/srv/job",
        root="/",
        uid=0,
        gid=0,
        state="S",
        tracer_pid=0,
        kernel_thread=False,
        threads=(pid, pid + 1),
        rss_bytes=GIB,
        shared_bytes=0,
        swap_bytes=0,
        namespaces=dict(NAMESPACES),
        cgroup="/job",
        descriptors=(Descriptor(0, "device", "/dev/null"), Descriptor(3, "anon", "anon_inode:[eventpoll]")),
        environment_names=("PATH",),
    )
    return replace(base, **changes)


def file(path: str, **changes: Any) -> OpenFile:
    base = OpenFile(
        path=path,
        uses=("1000 fd 4",),
        size=4096,
        mode=stat.S_IFREG | 0o644,
        mtime=1000.0,
        device=1,
        inode=zlib.crc32(path.encode()),
        links=1,
        blocks_bytes=4096,
    )
    return replace(base, **changes)


FILES = (
    file("/usr/bin/python3", uses=("1000 exe", "1000 map"), mode=stat.S_IFREG | 0o755, build_id="ab12"),
    file("/srv/job", uses=("1000 cwd",), mode=stat.S_IFDIR | 0o755),
    file("/srv/job/data.bin"),
)


def tree(*more: Process, **changes: Any) -> Tree:
    root = changes.pop("root_process", process())
    base = Tree(root.id, (root, *more), FILES, (), (), (), Surroundings())
    return replace(base, **changes)


def gpu_tree(*more: Process, **changes: Any) -> Tree:
    return replace(
        tree(*more),
        **{
            "cuda": (CudaProcess(ProcessId(1000, 6000), 1001, "running"),),
            "gpu_uses": (GpuUse(1000, "GPU-aaaa", 16 * GIB),),
            **changes,
        },
    )


def dump(the_tree: Tree | None = None, **changes: Any) -> DumpFacts:
    """Facts of a dump that may go on; `request` changes go by `ask_...` names."""
    asked = {name[4:]: changes.pop(name) for name in tuple(changes) if name.startswith("ask_")}
    base = DumpFacts(
        request=DumpRequest(pid=1000, image=Path("/srv/images/one"), **asked),
        tree=the_tree or tree(),
        host=HOST,
        own_pid=77,
        own_uid=0,
        ancestors_of_gpuckpt=frozenset({1, 50}),
        own_namespaces=dict(NAMESPACES),
        image_exists=False,
        image_parent_ok=True,
        image_parent_mode=stat.S_IFDIR | 0o755,
        image_parent_owner=0,
        image_space_bytes=500 * GIB,
    )
    return replace(base, **changes)


def gpu_dump(**changes: Any) -> DumpFacts:
    return dump(gpu_tree(), **changes)


def manifest(the_tree: Tree | None = None, **changes: Any) -> Manifest:
    the_tree = the_tree or tree()
    cuda = tuple(CudaSuspension(c.id, c.restore_tid, {"GPU-aaaa": 16 * GIB}) for c in the_tree.cuda)
    base = Manifest(
        format=1,
        requires=("criu-files",),
        image_id="0" * 32,
        created=1000.0,
        gpuckpt="0.1.0",
        host=HOST,
        tree=the_tree,
        criu=CriuOptions("4.3", "run", False, True, "nftables", False, 1 << 30, True, (), "none"),
        parts=(),
        captured=(),
        stopped=(),
        handed_over_stopped=bool(cuda),
        cuda=cuda,
        tcp="refuse",
        left_running=False,
        lineage=Lineage(),
        bytes_raw=2 * GIB,
    )
    return replace(base, **changes)


def restore(the_tree: Tree | None = None, **changes: Any) -> RestoreFacts:
    """Facts of a restore that may go on; `ask_...` go to the request, `made_...` to the manifest."""
    asked = {name[4:]: changes.pop(name) for name in tuple(changes) if name.startswith("ask_")}
    made = {name[5:]: changes.pop(name) for name in tuple(changes) if name.startswith("made_")}
    image = manifest(the_tree, **made)
    here = {entry.path: replace(entry) for entry in image.tree.files if not entry.deleted}
    base = RestoreFacts(
        request=RestoreRequest(Path("/srv/images/one"), **asked),
        manifest=image,
        host=HOST,
        own_uid=0,
        files_here={**here, **changes.pop("files", {})},
        ids_in_use={},
        ports_in_use={},
        missing_addresses=(),
        free_memory_bytes=100 * GIB,
        image_mode=stat.S_IFDIR | 0o700,
        image_owner=0,
        lsm="",
    )
    return replace(base, **changes)


def gpu_restore(**changes: Any) -> RestoreFacts:
    return restore(gpu_tree(), **changes)


def host(**changes: Any) -> Host:
    return replace(HOST, **changes)


def criu(**changes: Any) -> Host:
    return replace(HOST, criu=replace(CRIU, **changes))


def driver(**changes: Any) -> Host:
    return replace(HOST, gpu=replace(DRIVER, **changes))


def with_socket(socket: Socket, **changes: Any) -> Tree:
    return tree(sockets=(socket,), **changes)


OUTSIDE_TCP = Socket(
    9001, "inet", "stream", "established", "10.0.0.1:40000", "10.0.0.9:443", ("1000 fd 7",), inside=False
)
LISTENING = Socket(9002, "inet", "stream", "listen", "0.0.0.0:8000", "0.0.0.0:0", ("1000 fd 8",))
STDOUT_PIPE = Stdio(1, "pipe", "pipe:[500]", ("1000 fd 1",), True, "812 systemd-journal")
STDOUT_TTY = Stdio(1, "tty", "tty[8800:1]", ("1000 fd 1",), True, "900 sshd")


@dataclass(frozen=True)
class Case:
    """Facts with which a check passes (or does not apply), and facts with which it fails."""

    passing: DumpFacts | RestoreFacts
    failing: DumpFacts | RestoreFacts
    words: tuple[str, ...]
    """What the failure must name."""
    quiet: bool = False
    """The check has nothing to say in the passing case."""


Cases = dict[str, Case]


def judged(name: str, facts: DumpFacts | RestoreFacts) -> Finding | None:
    """The finding of one check."""
    checks = DUMP_CHECKS if isinstance(facts, DumpFacts) else RESTORE_CHECKS
    return next(check for check in checks if check.id == name).finding(facts, frozenset())


def verdict(name: str, facts: DumpFacts | RestoreFacts) -> str | None:
    """What one check says; None where it does not apply."""
    found = judged(name, facts)
    return found.verdict if found else None

"""One passing and one failing case for every check of a restore."""

from __future__ import annotations

import os
import stat
from dataclasses import replace
from pathlib import Path

from checkfacts import (
    GIB,
    GPU0,
    GPU1,
    HOST,
    LISTENING,
    OUTSIDE_TCP,
    STDOUT_PIPE,
    STDOUT_TTY,
    Case,
    Cases,
    criu,
    driver,
    file,
    gpu_restore,
    gpu_tree,
    host,
    restore,
    tree,
    with_socket,
)

from gpuckpt.model.facts import Socket, Surroundings
from gpuckpt.model.manifest import OPEN, CapturedFile

FINE = restore()
GPU_FINE = gpu_restore()
OLD_CPU = replace(HOST.cpu, model="AMD EPYC 7763", flags=("fpu", "cx8", "sse4_2", "avx2"))
KERNEL_FLAGS_ONLY = replace(HOST.cpu, flags=("fpu", "cx8", "sse4_2", "avx2", "avx512f", "amx_tile"))

MACHINE: Cases = {
    "privilege": Case(FINE, restore(host=host(missing_capabilities=("CAP_SYS_PTRACE",))), ("CAP_SYS_PTRACE",)),
    "criu-present": Case(FINE, restore(host=criu(version=None, problem="it does not start")), ("does not start",)),
    "criu-works": Case(FINE, restore(host=criu(check_ok=False)), ("fails",)),
    "criu-kernel": Case(FINE, restore(host=criu(version="3.19")), ("3.19",)),
    # An image of 4.3 restored by 4.1.1 fails with 'vdso: ELF header magic mismatch': failures.md C2.
    "criu-image": Case(FINE, restore(host=criu(version="4.2.1")), ("4.2.1",)),
    "network-lock": Case(
        restore(with_socket(OUTSIDE_TCP)),
        restore(with_socket(OUTSIDE_TCP), host=criu(network_lock="iptables")),
        ("iptables",),
    ),
    "machine": Case(FINE, restore(host=host(machine="aarch64")), ("aarch64",)),
    "cpu-flags": Case(
        restore(host=host(cpu=KERNEL_FLAGS_ONLY)), restore(host=host(cpu=OLD_CPU)), ("amx_tile", "avx512f")
    ),
    "kernel": Case(FINE, restore(host=host(kernel="6.1.0-30-amd64")), ("6.1.0",)),
    "glibc": Case(FINE, restore(host=host(glibc="2.36")), ("2.36",)),
    "lsm": Case(FINE, restore(lsm="apparmor"), ("apparmor",)),
}

SEMAPHORE = file("/dev/shm/sem.Xy12", deleted=True, links=1, inode=42)
SAVED = CapturedFile("/dev/shm/link_remap.1", "files/0", "link-remap", 0o600, 0, 0, 1000 * 10**9)

IMAGE: Cases = {
    "image-safe": Case(FINE, restore(image_mode=stat.S_IFDIR | 0o775, image_owner=1001), ("0775", "uid 1001")),
    "original": Case(
        restore(made_left_running=True),
        restore(made_left_running=True, ids_in_use={1000: "1000 python"}),
        ("1000 python",),
    ),
    "linked-files": Case(
        restore(tree(files=(SEMAPHORE,)), made_captured=(SAVED,)),
        restore(tree(files=(SEMAPHORE,))),
        ("/dev/shm/sem.Xy12",),
    ),
    "leftovers": Case(FINE, restore(leftovers=("criu process 4321 of run 7",)), ("4321",)),
}

DATA = "/srv/job/data.bin"
CAPTURED = CapturedFile(DATA, "files/open-0", "open", 0o644, 0, 0, 1000 * 10**9)
PYTHON = "/usr/bin/python3"
FILES_HERE = {entry.path: entry for entry in tree().files}
FILES: Cases = {
    "files-missing": Case(FINE, restore(files={DATA: None, PYTHON: None}), (DATA, PYTHON, "1000 exe")),
    "directories": Case(FINE, restore(files={"/srv/job": None}), ("/srv/job", "1000 cwd")),
    "files-size": Case(FINE, restore(files={DATA: file(DATA, size=9000)}), (DATA, "9000", "4096")),
    "files-changed": Case(
        restore(made_captured=(CAPTURED,), captured_here={DATA: "same"}),
        restore(made_captured=(CAPTURED,), captured_here={DATA: "other"}),
        (DATA,),
    ),
    "files-written": Case(
        restore(made_captured=(CAPTURED,), captured_here={DATA: "other"}, ask_overwrite_files=True),
        restore(
            made_captured=(CAPTURED,),
            captured_here={DATA: "other"},
            ask_overwrite_files=True,
            writers={DATA: "812 bash"},
        ),
        (f"{DATA} by 812 bash",),
    ),
    "files-build": Case(
        FINE, restore(files={PYTHON: file(PYTHON, mode=stat.S_IFREG | 0o755, build_id="cd34")}), ("cd34", "ab12")
    ),
    "files-mode": Case(FINE, restore(files={DATA: file(DATA, mode=stat.S_IFREG | 0o600)}), ("100600", "100644")),
    "files-owner": Case(
        FINE,
        restore(files={DATA: file(DATA, uid=1000), PYTHON: replace(FILES_HERE[PYTHON], resolved="/root/secret")}),
        (f"{DATA} belongs to 1000:0, belonged to 0:0", "/root/secret"),
    ),
    "files-content": Case(FINE, restore(files={DATA: file(DATA, mtime=2000.0)}), (DATA,)),
    "files-captured": Case(
        restore(made_captured=(SAVED,), files={SAVED.path: None}),
        restore(made_captured=(SAVED,), files={SAVED.path: file(SAVED.path, mtime=5.0)}),
        (SAVED.path,),
    ),
}

TERMINAL_JOB = tree(outside_stdio=(STDOUT_TTY,), surroundings=Surroundings(has_terminal=True))
ARRIVAL: Cases = {
    "pids-free": Case(FINE, restore(ids_in_use={1001: "812 sshd (as thread)"}), ("1001 by 812 sshd",)),
    "ports-free": Case(
        restore(with_socket(LISTENING)),
        restore(with_socket(LISTENING), ports_in_use={"tcp 0.0.0.0:8000": "900 nginx"}),
        ("8000", "900 nginx"),
    ),
    "addresses": Case(
        restore(with_socket(OUTSIDE_TCP), made_tcp="keep"),
        restore(with_socket(OUTSIDE_TCP), made_tcp="keep", missing_addresses=("10.0.0.1",)),
        ("10.0.0.1",),
    ),
    "tcp-outside": Case(
        restore(with_socket(OUTSIDE_TCP), ask_tcp="close"), restore(with_socket(OUTSIDE_TCP)), ("10.0.0.9:443",)
    ),
    "stdio": Case(
        restore(tree(outside_stdio=(STDOUT_PIPE,)), ask_stdio={1: Path("/var/log/job")}),
        restore(tree(outside_stdio=(STDOUT_PIPE,))),
        ("fd 1", "pipe"),
    ),
    "stdio-used": Case(
        restore(tree(outside_stdio=(STDOUT_PIPE,)), ask_stdio={1: Path("/var/log/job")}),
        restore(ask_stdio={1: Path("/var/log/job")}),
        ("--stdout /var/log/job",),
    ),
    "terminal": Case(restore(TERMINAL_JOB, ask_wait=True), restore(TERMINAL_JOB), ("without --wait",)),
    "host-memory": Case(FINE, restore(free_memory_bytes=GIB), ("1.0 GiB free",)),
    "file-locks": Case(FINE, restore(tree(file_locks=True)), ("not looked at",), quiet=True),
}

SHARED = file("/dev/shm/psm_1", uses=("1000 map shared-write",))
SAVED = CapturedFile(SHARED.path, "files/open-0", OPEN, 0o600, 0, 0, 0)
LOG = file("/var/log/job", uses=("1000 fd 3",), flags=os.O_WRONLY)
UNIX = Socket(9003, "unix", "stream", "listen", "/run/job.sock", "", ("1000 fd 9",))
ISOLATION: Cases = {
    "netns": Case(
        restore(ask_netns="blue"), restore(ask_netns="blue", network_exists=False), ("there is none of that name",)
    ),
    "isolated-terminal": Case(
        restore(TERMINAL_JOB), restore(TERMINAL_JOB, ask_isolate=frozenset({"pid"})), ("open",), quiet=True
    ),
    "ports-moved": Case(
        restore(with_socket(LISTENING), ask_ports={8000: 8001}),
        restore(with_socket(LISTENING), ask_ports={8000: 8001, 9000: 9001}),
        ("bound to 9000",),
    ),
    "unix-names": Case(
        restore(with_socket(UNIX)),
        restore(with_socket(UNIX), unix_names_in_use={"/run/job.sock": "812 python"}),
        ("/run/job.sock by 812 python",),
    ),
    "clone-tcp": Case(
        restore(with_socket(OUTSIDE_TCP), ask_clone=True, ask_tcp="close"),
        restore(with_socket(OUTSIDE_TCP), ask_clone=True, ask_tcp="keep"),
        ("keep",),
    ),
    "clone-memory": Case(
        restore(tree(files=(SHARED,)), ask_clone=True, made_captured=(SAVED,)),
        restore(tree(files=(SHARED,)), ask_clone=True),
        (SHARED.path,),
    ),
    "clone-files": Case(restore(ask_clone=True), restore(tree(files=(LOG,)), ask_clone=True), (LOG.path,)),
    "clone-identity": Case(FINE, restore(ask_clone=True), ("UUIDs",), quiet=True),
}

CUDA_LIB = file("/usr/lib/x86_64-linux-gnu/libcuda.so.580.159.04", uses=("1000 map",), build_id="aa", size=100)
SWAPPED = {"0": "1", "1": "0"}
OTHER_GPUS = (replace(GPU0, uuid="GPU-cccc"), replace(GPU1, uuid="GPU-dddd"))
NCCL_JOB = gpu_tree(files=(file("/usr/lib/libnccl.so.2", uses=("1000 map",)),))
GPU: Cases = {
    "gpu-driver": Case(GPU_FINE, gpu_restore(host=driver(version=None, interface="none")), ("no driver",)),
    "gpu-bugs": Case(GPU_FINE, gpu_restore(host=driver(version="610.57")), ("SIGSEGV",)),
    "gpu-mps": Case(GPU_FINE, gpu_restore(host=driver(mps=True)), ("MPS",)),
    "huge-pages": Case(
        gpu_restore(host=host(transparent_huge_pages="always")),
        gpu_restore(host=host(transparent_huge_pages="madvise")),
        ("madvise",),
    ),
    "gpu-persistence": Case(
        GPU_FINE, gpu_restore(host=driver(gpus=(replace(GPU0, persistence_mode=False),))), ("GPU-aaaa",)
    ),
    "gpu-same-driver": Case(GPU_FINE, gpu_restore(host=driver(version="575.57.08")), ("575.57.08",)),
    "gpu-libraries": Case(
        restore(gpu_tree(files=(CUDA_LIB,))),
        restore(gpu_tree(files=(CUDA_LIB,)), files={CUDA_LIB.path: replace(CUDA_LIB, build_id="bb")}),
        (CUDA_LIB.path,),
    ),
    "gpu-present": Case(GPU_FINE, gpu_restore(host=driver(gpus=OTHER_GPUS)), ("GPU-aaaa",)),
    "gpu-map": Case(
        gpu_restore(ask_gpu_map=SWAPPED), gpu_restore(ask_gpu_map={"0": "1", "1": "7"}), ("7 is no GPU of this host",)
    ),
    "gpu-model": Case(
        GPU_FINE,
        gpu_restore(host=driver(gpus=(GPU0, replace(GPU1, name="NVIDIA H100"))), ask_gpu_map=SWAPPED),
        ("NVIDIA H100", "NVIDIA H200"),
    ),
    "gpu-count": Case(
        gpu_restore(ask_gpu_map=SWAPPED), gpu_restore(host=driver(gpus=(GPU1,)), ask_gpu_map={"0": "1"}), ("1: ",)
    ),
    "gpu-mig": Case(
        GPU_FINE, gpu_restore(host=driver(gpus=(replace(GPU0, mig_enabled=True), GPU1))), ("GPU-aaaa", "MIG")
    ),
    "gpu-memory": Case(
        GPU_FINE,
        gpu_restore(
            host=driver(gpus=(replace(GPU0, memory_free_bytes=10 * GIB), GPU1)),
            gpu_holders={"GPU-aaaa": ("812 python, 130 GiB",)},
        ),
        ("17.0 GiB", "10.0 GiB", "812 python"),
    ),
    "gpu-bus-ids": Case(
        restore(NCCL_JOB),
        restore(NCCL_JOB, host=driver(gpus=(replace(GPU0, pci_bus_id="00000000:AA:00.0"), GPU1))),
        ("00000000:AA:00.0",),
    ),
}

CASES: Cases = {**MACHINE, **IMAGE, **FILES, **ARRIVAL, **ISOLATION, **GPU}

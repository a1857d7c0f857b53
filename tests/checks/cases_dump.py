"""One passing and one failing case for every check of a dump."""

from __future__ import annotations

import stat
from dataclasses import replace

from checkfacts import (
    GIB,
    GPU0,
    GPU1,
    LISTENING,
    NAMESPACES,
    OUTSIDE_TCP,
    STDOUT_PIPE,
    Case,
    Cases,
    criu,
    driver,
    dump,
    file,
    gpu_dump,
    gpu_tree,
    host,
    process,
    tree,
    with_socket,
)

from gpuckpt.checks import MemoryLimit
from gpuckpt.model.facts import (
    CudaProcess,
    Descriptor,
    Engine,
    GpuMapping,
    GpuUse,
    Pipe,
    ProcessId,
    Socket,
    Surroundings,
)

FINE = dump()
GPU_FINE = gpu_dump()


def root(**changes):
    return dump(tree(root_process=process(**changes)))


def around(**changes):
    return dump(tree(surroundings=Surroundings(**changes)))


def opened(kind, target):
    return root(descriptors=(Descriptor(5, kind, target),))


def unix(**changes):
    base = Socket(
        700, "unix", "stream", "connected", "", "/run/dbus.sock", ("1000 fd 6",), 701, "812 dbus-daemon", False
    )
    return with_socket(replace(base, **changes))


OWN_PID_NS = {**NAMESPACES, "pid": "pid:[4026532000]", "mnt": "mnt:[4026532001]"}
PRIVATE_TMP = {**NAMESPACES, "mnt": "mnt:[4026532001]", "time": "time:[4026532009]"}

MACHINE: Cases = {
    "privilege": Case(
        FINE, dump(host=host(privileged=False, missing_capabilities=("CAP_SYS_PTRACE",))), ("CAP_SYS_PTRACE",)
    ),
    "criu-present": Case(FINE, dump(host=criu(path=None, version=None)), ("criu",)),
    "criu-works": Case(
        FINE,
        dump(
            host=criu(
                check_ok=False, check_output="Warn x\nError (criu/vdso.c): vdso: Unexpected rt vDSO area bounds\n"
            )
        ),
        ("Unexpected rt vDSO",),
    ),
    # Debian 12's CRIU on a new kernel: failures.md C2.
    "criu-kernel": Case(FINE, dump(host=criu(version="3.17.1")), ("3.17.1",)),
    "criu-inet": Case(
        dump(with_socket(LISTENING)), dump(with_socket(LISTENING), host=criu(version="4.1.1")), ("4.1.1", "1000 fd 8")
    ),
    "network-lock": Case(
        dump(with_socket(OUTSIDE_TCP)), dump(with_socket(OUTSIDE_TCP), host=criu(network_lock="skip")), ("neither",)
    ),
}

PROCESSES: Cases = {
    "alive": Case(FINE, root(state="Z", ppid=900), ("1000 python",)),
    "kernel-thread": Case(FINE, root(kernel_thread=True, comm="kworker/0:1"), ("kworker",)),
    "own-ancestor": Case(FINE, dump(ancestors_of_gpuckpt=frozenset({1, 1000})), ("77", "1000")),
    "foreign": Case(
        dump(host=host(privileged=False), own_uid=1001, the_tree=tree(root_process=process(uid=1001))),
        dump(host=host(privileged=False), own_uid=1001),
        ("uid 0",),
    ),
    "traced": Case(
        FINE, replace(root(tracer_pid=812, state="t"), tracers={812: "812 gdb"}), ("1000 python", "812 gdb")
    ),
    "uninterruptible": Case(FINE, root(state="D"), ("1000 python",)),
    "stopped": Case(FINE, root(state="T"), ("1000 python",), quiet=True),
    "container": Case(
        FINE,
        dump(
            tree(
                root_process=process(namespaces=OWN_PID_NS),
                surroundings=Surroundings(container_id="4f1e", container_runtime="docker"),
            )
        ),
        ("4f1e", "docker"),
    ),
    "namespaces": Case(FINE, root(namespaces=PRIVATE_TMP), ("mnt: 1000 python",)),
    "foreground": Case(
        GPU_FINE, dump(replace(gpu_tree(), processes=(process(foreground=True),))), ("1000 python",), quiet=True
    ),
    "supervisor": Case(
        around(systemd_unit="job.service", systemd_restart="no"),
        around(systemd_unit="job.service", systemd_restart="always"),
        ("job.service", "always"),
    ),
}

OBJECTS: Cases = {
    "io-uring": Case(FINE, root(io_uring=True), ("1000 python",)),
    "devices": Case(opened("device", "/dev/urandom"), opened("device", "/dev/fuse"), ("fd 5", "/dev/fuse")),
    "kernel-objects": Case(
        opened("anon", "anon_inode:[eventfd]"), opened("anon", "anon_inode:[perf_event]"), ("fd 5", "perf_event")
    ),
    "tcp-outside": Case(
        dump(with_socket(OUTSIDE_TCP), ask_tcp="close"),
        dump(with_socket(OUTSIDE_TCP)),
        ("1000 fd 7", "10.0.0.9:443", "established"),
    ),
    "unix-outside": Case(dump(unix(type="dgram")), dump(unix()), ("1000 fd 6", "812 dbus-daemon")),
    "pipe-outside": Case(
        dump(tree(pipes=(Pipe(500, ("1000 fd 1",), False),), outside_stdio=(STDOUT_PIPE,))),
        dump(tree(pipes=(Pipe(501, ("1000 fd 9",), False, "900 bash"),), outside_stdio=(STDOUT_PIPE,))),
        ("1000 fd 9", "900 bash"),
    ),
    "stdio": Case(FINE, dump(tree(outside_stdio=(STDOUT_PIPE,))), ("fd 1", "812 systemd-journal"), quiet=True),
    "inotify": Case(
        dump(proc_watches=()), dump(proc_watches=("1000 fd 5 watches /proc/self/status",)), ("/proc/self/status",)
    ),
    "file-locks": Case(FINE, dump(tree(file_locks=True)), ("locks",), quiet=True),
    "deleted-files": Case(
        FINE,
        dump(tree(files=(file("/tmp/big", deleted=True, links=0, blocks_bytes=2 << 20),))),
        ("/tmp/big", "2.0 MiB"),
        quiet=True,
    ),
}

LOG = file("/srv/job/state.db", flags=0o2)
IMAGE: Cases = {
    "image-absent": Case(FINE, dump(image_exists=True), ("/srv/images/one",)),
    "image-parent": Case(FINE, dump(image_parent_ok=False, image_parent_mode=0), ("/srv/images",)),
    "image-parent-safe": Case(
        dump(image_parent_mode=stat.S_IFDIR | 0o1777), dump(image_parent_mode=stat.S_IFDIR | 0o777), ("0777",)
    ),
    "disk-space": Case(FINE, dump(image_space_bytes=GIB), ("1.0 GiB free",)),
    "capture-files": Case(
        dump(tree(files=(LOG,)), ask_capture_files=("/srv/job/state.db",)),
        dump(tree(files=(LOG,)), ask_capture_files=("/srv/job/state.db", "/srv/job/other")),
        ("/srv/job/other: the tree has no such file open",),
    ),
    "left-files": Case(
        dump(tree(files=(LOG,)), ask_leave_running=True),
        dump(tree(files=(LOG,)), ask_leave_running=True, ask_capture_files=("none",)),
        ("/srv/job/state.db",),
    ),
}

MIG_GPU = replace(GPU0, mig_enabled=True)
FORKED = process(1010, comm="worker", gpu_files=(GpuMapping("fd 21", "/dev/nvidia0"),))
OWNER = process(gpu_files=(GpuMapping("fd 20", "/dev/nvidia0"),))
CUDA_1000 = CudaProcess(ProcessId(1000, 6000), 1001, "running")
CUDA_1010 = CudaProcess(ProcessId(1010, 6010), 1011, "running")
NCCL_FILE = file("/usr/lib/python3/site-packages/nvidia/nccl/lib/libnccl.so.2", uses=("1000 map", "1010 map"))
RANKS = (
    Socket(1, "inet", "stream", "established", "127.0.0.1:5000", "127.0.0.1:6000", ("1000 fd 30",)),
    Socket(2, "inet", "stream", "established", "127.0.0.1:6000", "127.0.0.1:5000", ("1010 fd 31",)),
)
SAFE = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}


def two_ranks(environment, sockets=RANKS):
    job = gpu_tree(process(1010), cuda=(CUDA_1000, CUDA_1010), files=(NCCL_FILE,), sockets=sockets)
    return dump(job, nccl_environment=environment)


GPU: Cases = {
    "gpu-driver": Case(
        GPU_FINE,
        gpu_dump(host=driver(version="550.54.14", interface="none", problem="driver 550.54.14 is too old")),
        ("550.54.14",),
    ),
    "gpu-features": Case(
        GPU_FINE,
        dump(
            gpu_tree(engines=(Engine("torch", "2.11"),)),
            host=driver(version="565.57.01", interface="program", program="/usr/bin/cuda-checkpoint"),
        ),
        ("565.57.01",),
    ),
    "gpu-bugs": Case(GPU_FINE, gpu_dump(host=driver(version="595.71.05")), ("freeze",)),
    "gpu-readable": Case(
        GPU_FINE, gpu_dump(host=driver(gpus=(replace(GPU0, problem="GPU is lost"), GPU1))), ("GPU-aaaa", "lost")
    ),
    "gpu-mig": Case(GPU_FINE, gpu_dump(host=driver(gpus=(MIG_GPU, GPU1))), ("GPU-aaaa", "MIG")),
    "gpu-mps": Case(GPU_FINE, gpu_dump(host=driver(mps=True)), ("MPS",)),
    # DataLoader workers forked after CUDA began: failures.md G13.
    "gpu-files": Case(
        dump(replace(gpu_tree(), processes=(OWNER,))),
        dump(replace(gpu_tree(), processes=(OWNER, FORKED))),
        ("1010 worker", "fd 21", "/dev/nvidia0"),
    ),
    "gpu-state": Case(GPU_FINE, dump(gpu_tree(cuda=(replace(CUDA_1000, state="locked"),))), ("1000: locked",)),
    "gpu-copy-room": Case(
        GPU_FINE, gpu_dump(memory_limits=(MemoryLimit("cgroup /job", 8 * GIB),)), ("cgroup /job", "8.0 GiB")
    ),
    "gpu-shared": Case(
        GPU_FINE, gpu_dump(host=driver(gpus=(replace(GPU0, compute_pids=(1000, 812)), GPU1))), ("GPU-aaaa", "812")
    ),
    "gpu-managed": Case(
        GPU_FINE,
        dump(
            replace(
                gpu_tree(),
                processes=(replace(OWNER, gpu_files=(GpuMapping("7f00-7f80", "/dev/nvidia-uvm", 256 << 20),)),),
            )
        ),
        ("256 MiB",),
    ),
    "gpu-several": Case(
        GPU_FINE,
        dump(gpu_tree(gpu_uses=(GpuUse(1000, "GPU-aaaa", GIB), GpuUse(1000, "GPU-bbbb", GIB)))),
        ("1000 has memory on 2 GPUs",),
    ),
    "huge-pages": Case(
        gpu_dump(host=host(transparent_huge_pages="always")),
        gpu_dump(host=host(transparent_huge_pages="madvise")),
        ("madvise",),
    ),
    "gpu-persistence": Case(
        GPU_FINE, gpu_dump(host=driver(gpus=(replace(GPU0, persistence_mode=False),))), ("GPU-aaaa",)
    ),
    "nccl-sharing": Case(
        two_ranks({1000: SAFE, 1010: SAFE}),
        two_ranks({1000: {"NCCL_P2P_DISABLE": "1"}, 1010: SAFE}),
        ("1000: NCCL_P2P_DISABLE=1", "127.0.0.1:5000"),
    ),
}

CASES: Cases = {**MACHINE, **PROCESSES, **OBJECTS, **IMAGE, **GPU}

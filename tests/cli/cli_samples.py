"""Sample facts: one inference server with two processes, as dump, inspect and restore would report them."""

from dataclasses import replace

from gpuckpt.model.facts import (
    Cpu,
    CriuProgram,
    CudaProcess,
    Descriptor,
    Engine,
    Gpu,
    GpuDriver,
    GpuUse,
    Host,
    OpenFile,
    Pipe,
    Process,
    ProcessId,
    Socket,
    Stdio,
    Surroundings,
    Tree,
)
from gpuckpt.model.jsonform import to_json
from gpuckpt.model.manifest import CapturedFile, CriuOptions, CudaSuspension, Lineage, Manifest, Part
from gpuckpt.model.report import Finding, Report

GIB = 1 << 30
UUID = "GPU-5f3c8a51-2d0e-4f0b-9a77-0e0d6a4f9f10"

PASSING = Finding("root", "pass", "block", "root", "running as root")
WARNING = Finding("persistence-mode", "fail", "warn", "on", "GPU 0: off", "turn it on: nvidia-smi -pm 1", status=20)
NOTE = Finding("huge-pages", "fail", "note", "always", "madvise", "`always` makes CUDA checkpoints faster")
UNKNOWN = Finding("nccl", "unknown", "block", "no NCCL shared memory", "maps of 4243 unreadable", irreversible=True)
BLOCKING = Finding(
    "tcp-outside",
    "fail",
    "block",
    "no connection that leaves the tree",
    "10.0.0.1:41022 -> 10.0.0.9:6379 (4242 fd 17)",
    "decide what becomes of it: --tcp keep or --tcp close",
)


def process(pid: int, ppid: int, *argv: str, comm: str = "python3", rss: int = 3 * GIB) -> Process:
    return Process(
        id=ProcessId(pid, 1000 + pid),
        ppid=ppid,
        pgid=4242,
        sid=4242,
        comm=comm,
        argv=argv,
        exe="/usr/bin/python3.11",
        cwd="/srv/llm",
        root="/",
        uid=1000,
        gid=1000,
        state="S",
        tracer_pid=0,
        kernel_thread=False,
        threads=tuple(range(pid, pid + 18)),
        rss_bytes=rss,
        shared_bytes=GIB,
        swap_bytes=0,
        namespaces={"pid": "pid:[4026531836]"},
        cgroup="/system.slice/llm.service",
        descriptors=(Descriptor(0, "device", "/dev/null"),),
        environment_names=("HOME", "PATH"),
    )


def tree() -> Tree:
    server = [
        "/usr/bin/python3",
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        "meta-llama/Llama-3.1-8B-Instruct",
    ]
    return Tree(
        root=ProcessId(4242, 5242),
        processes=(
            process(4242, 1, *server, "--api-key", "<redacted>"),
            process(4243, 4242, "VLLM::EngineCore", comm="VLLM::EngineCor", rss=17 * GIB),
            process(4250, 4243, "/usr/bin/python3", "-c", "from multiprocessing.resource_tracker import main;main(7)"),
            process(4251, 4242, comm="tee", rss=900 << 10),
        ),
        files=(
            OpenFile("/srv/llm/log/server.log", ("4242 fd 3",), 81234, 0o100644, 1.8e9, 1, 2, 1, 90112, flags=0o2001),
            OpenFile(
                "/dev/shm/sem.mp-k3j2", ("4242 map shared-write",), 32, 0o100600, 1.8e9, 2, 3, 0, 4096, deleted=True
            ),
            OpenFile(
                "/srv/models/llama/model-00001-of-00004.safetensors",
                ("4243 fd 9", "4243 map"),
                5 * GIB,
                0o100644,
                1.7e9,
                1,
                4,
                1,
                5 * GIB,
                flags=0,
            ),
            *(
                OpenFile(
                    f"/usr/lib/x86_64-linux-gnu/lib{name}.so",
                    ("4242 map", "4243 map"),
                    900_000,
                    0o100644,
                    1.7e9,
                    1,
                    10 + n,
                    1,
                    901_120,
                )
                for n, name in enumerate(
                    ["c", "m", "cuda", "nvidia-ml", "stdc++", "torch_cuda", "gcc_s", "z", "ssl", "dl"]
                )
            ),
            OpenFile("/usr/bin/python3.11", ("4242 exe", "4250 exe"), 6_831_704, 0o100755, 1.7e9, 1, 30, 1, 6_831_704),
        ),
        sockets=(
            Socket(77, "inet", "stream", "listen", "0.0.0.0:8000", "", ("4242 fd 12",)),
            Socket(
                78, "inet", "stream", "established", "10.0.0.1:41022", "10.0.0.9:6379", ("4242 fd 17",), inside=False
            ),
            Socket(79, "unix", "stream", "connected", "", "", ("4242 fd 20", "4243 fd 5"), peer_inode=80),
        ),
        pipes=(
            Pipe(91, ("4242 fd 8", "4250 fd 7"), inside=True),
            Pipe(92, ("4251 fd 1",), inside=False, peer="812 logger"),
        ),
        outside_stdio=(Stdio(1, "pipe", "pipe:[92]", ("4242 fd 1", "4243 fd 1"), writable=True, peer="812 logger"),),
        surroundings=Surroundings(systemd_unit="llm.service", systemd_restart="on-failure", slurm_job_id="4711"),
        cuda=(CudaProcess(ProcessId(4243, 5243), 4247, "running"),),
        gpu_uses=(GpuUse(4243, UUID, 18 * GIB),),
        engines=(
            Engine(
                "vllm",
                "0.31.0",
                "meta-llama/Llama-3.1-8B-Instruct",
                ("/srv/models/llama/model-00001-of-00004.safetensors",),
            ),
            Engine("torch", "2.11.0"),
        ),
    )


def host(*, gpu: bool = True) -> Host:
    card = Gpu(0, UUID, "NVIDIA H200", 141 * GIB, 120 * GIB, persistence_mode=False, compute_pids=(4243,))
    bad = Gpu(1, "GPU-2", "NVIDIA H200", None, None, problem="fell off the bus (Xid 79)")
    driver = GpuDriver("580.159.04", "13.0", "api", None, (card, bad)) if gpu else GpuDriver(problem="no NVIDIA driver")
    return Host(
        hostname="gpu07",
        kernel="6.12.48",
        machine="x86_64",
        os="Debian GNU/Linux 13",
        glibc="2.41",
        cpu=Cpu("Intel(R) Xeon(R) Platinum 8558", "GenuineIntel", ("avx512f",), 96),
        memory_total_bytes=1024 * GIB,
        memory_available_bytes=800 * GIB,
        privileged=True,
        missing_capabilities=(),
        criu=CriuProgram("/opt/gpuckpt/criu/bin/criu", "4.3", check_ok=True, network_lock="nftables"),
        gpu=driver,
        cgroup="systemd",
        python="3.11.7",
        gpuckpt="0.1.0",
        uptime_seconds=86400.0 * 12,
        transparent_huge_pages="madvise",
        image_space_bytes=2000 * GIB,
    )


def manifest() -> Manifest:
    return Manifest(
        format=1,
        requires=("criu-files",),
        image_id="0f6f2a7c9e514f60",
        created=1_795_000_000.0,
        gpuckpt="0.1.0",
        host=host(),
        tree=tree(),
        criu=CriuOptions("4.3", "a1", False, True, "nftables", False, 1 << 29, False, (), "cpu"),
        parts=(
            Part("criu/pages-1.img", 3 * GIB, "00"),
            Part("criu/pages-2.img", 17 * GIB, "00"),
            Part("criu/core-4242.img", 2807, "00"),
            Part("files/0", 32, "00"),
        ),
        captured=(CapturedFile("/dev/shm/sem.mp-k3j2", "files/0", "link-remap", 0o600, 1000, 1000, 0),),
        stopped=(),
        handed_over_stopped=True,
        cuda=(CudaSuspension(ProcessId(4243, 5243), 4247, {UUID: 18 * GIB}),),
        tcp="keep",
        left_running=False,
        lineage=Lineage("9d1ca1ab77e04c22", 2),
        seconds={"lock": 0.0006, "gpu_to_host": 6.2, "freeze": 0.02, "capture": 8.4, "publish": 1.1},
        frozen_seconds=15.9,
        stopped_seconds=9.7,
        bytes_raw=20 * GIB,
        bytes_stored=20 * GIB,
    )


def image_report(**data) -> Report:
    base = {
        "kind": "image",
        "path": "/var/lib/gpuckpt/llm-2026-11-30",
        "manifest": to_json(manifest()),
        "verified": None,
        "restorable": "no",
        "bytes_on_disk": 20 * GIB + 4096,
    }
    return Report("inspect", "ok", "untouched", base | data, (PASSING, WARNING, BLOCKING))


def process_report(**data) -> Report:
    base = {
        "kind": "process",
        "tree": to_json(tree()),
        "host": to_json(host()),
        "dumpable": "no",
        "estimate_bytes": 39 * GIB,
    }
    return Report("inspect", "ok", "untouched", base | data, (PASSING, WARNING, BLOCKING, UNKNOWN, NOTE))


def host_report(*, able: bool = True) -> Report:
    found = host(gpu=able)
    if not able:
        found = replace(
            found,
            criu=CriuProgram(problem="CRIU was not found in PATH, /usr/sbin or /opt/gpuckpt/criu/bin"),
            privileged=False,
            missing_capabilities=("CAP_SYS_ADMIN", "CAP_SYS_PTRACE"),
        )
    lack = Finding(
        "criu", "fail", "block", "a CRIU that passes `criu check`", "none found", "apt install criu", status=10
    )
    data = {"kind": "host", "host": to_json(found), "can": {"dump": able, "restore": able, "gpu": able}}
    return Report("inspect", "ok", "untouched", data, (PASSING, WARNING) if able else (PASSING, lack))


def dump_report(**changes) -> Report:
    data = {
        "image": "/var/lib/gpuckpt/llm",
        "image_id": "0f6f2a7c9e514f60",
        "root_pid": 4242,
        "pids": [4242, 4243, 4250, 4251],
        "bytes_raw": 20 * GIB,
        "bytes_stored": 20 * GIB,
        "seconds": {"lock": 0.0006, "gpu_to_host": 6.2, "capture": 8.4, "publish": 1.1},
        "frozen_seconds": 15.9,
    }
    return replace(Report("dump", "ok", "ended", data, (PASSING, WARNING)), **changes)


def restore_report(**changes) -> Report:
    data = {
        "image": "/var/lib/gpuckpt/llm",
        "root_pid": 4242,
        "pids": [4242, 4243, 4250, 4251],
        "seconds": {"criu": 8.2, "host_to_gpu": 2.9},
    }
    return replace(Report("restore", "ok", "restored", data, (PASSING,)), **changes)

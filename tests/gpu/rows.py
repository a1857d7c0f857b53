"""The matrix: which GPU workloads are saved and restored, and what shall come of each. A new one is one entry in ROWS."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

WORKLOADS = Path(__file__).parent / "workloads"


@dataclass(frozen=True)
class Refusal:
    """A dump that is refused before anything is touched. `checks`: any of these has to fail; `words`: each has to be said."""

    checks: tuple[str, ...]
    words: tuple[str, ...]


@dataclass(frozen=True)
class Row:
    """One workload, how it is started, and what is expected of it."""

    name: str
    about: str
    program: str
    """A file in workloads/."""
    options: tuple[str, ...] = ()
    launcher: tuple[str, ...] = ()
    """Modules and options that start the program instead of Python alone."""
    environment: dict[str, str] = field(default_factory=dict)
    twin: bool = False
    """It has no rule: its lines are compared with those of the same program that nobody interrupts."""
    logs: tuple[str, ...] = ("",)
    """What the names of the tree's logs have after LOG; the first one tells the pace."""
    refused: Refusal | None = None
    dump_options: tuple[str, ...] = ()
    restore_options: tuple[str, ...] = ()
    health: str = ""
    """A path that answers 200 when it serves; LOG.port holds the port."""
    gpus: int = 1
    io_uring_off: bool = False
    """kernel.io_uring_disabled has to be 2 before it starts: PyTorch's TCPStore opens an io_uring, which no CRIU saves."""


SAME_SUMS = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
"""cuBLAS adds up in the same order only with a workspace of fixed size."""
QUIET_NCCL = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_NVLS_ENABLE": "0", "NCCL_IB_DISABLE": "1",
              "NCCL_SOCKET_IFNAME": "lo"}  # fmt: skip
"""Ranks that share no memory (each of the first two was seen to be needed: H200, driver 580). NVLS stays off in
every row: multicast objects cannot be suspended, and the driver was reported to hang."""
SHARING_NCCL = {"NCCL_NVLS_ENABLE": "0", "NCCL_SOCKET_IFNAME": "lo"}
"""NCCL's defaults but for NVLS: the driver would suspend such ranks and then fail to restore them."""
TORCHRUN = (
    "-m",
    "torch.distributed.run",
    "--nproc-per-node",
    "2",
    "--master-addr",
    "127.0.0.1",
    "--master-port",
    "29517",
)
FORKED = Refusal(("gpu-files",), ("spawn", "/dev/nvidia"))
NCCL_SHARES = Refusal(("nccl-sharing",), ("NCCL_P2P_DISABLE=1", "NCCL_SHM_DISABLE=1"))

ROWS = (
    Row("cuda_c", "plain CUDA C, runtime API", "counter.cu"),
    Row("managed", "managed memory (cudaMallocManaged), plain CUDA C", "counter.cu", ("--managed",),
        refused=Refusal(("gpu-managed",), ("managed", "cudaMallocManaged"))),
    Row("eager", "PyTorch, eager", "eager.py"),
    Row("graph", "PyTorch, captured CUDA graph", "graph.py"),
    Row("pinned", "PyTorch, pinned host memory", "pinned.py"),
    Row("streams", "PyTorch, streams and events with work in flight", "streams.py"),
    Row("threads", "PyTorch, eight threads with a stream each", "threads.py"),
    Row("convolutions", "cuBLAS and cuDNN, benchmark mode", "convolutions.py"),
    Row("training", "training loop, losses bit by bit as without an interruption", "training.py", twin=True,
        environment=SAME_SUMS),
    Row("loader_spawn", "DataLoader, workers by spawn", "loader.py", ("--method", "spawn")),
    Row("loader_early", "DataLoader, workers forked before CUDA began", "loader.py", ("--method", "early")),
    Row("loader_fork", "DataLoader, workers forked after CUDA began", "loader.py", ("--method", "fork"), refused=FORKED),
    Row("nvml", "NVML held open and polled in a CUDA process", "nvmlpolling.py"),
    Row("nvml_child", "NVML held open by a child without CUDA", "nvmlpolling.py", ("--child",)),
    Row("two_processes", "two processes on one GPU", "twoprocesses.py", logs=("", ".child")),
    Row("cupy", "CuPy", "cupycounter.py"),
    Row("numba", "Numba CUDA", "numbacounter.py"),
    Row("jax", "JAX, jit, donated input", "jaxcounter.py", environment={"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}),
    Row("compile", "torch.compile and a Triton kernel", "compiled.py",
        environment={"TORCHINDUCTOR_COMPILE_THREADS": "1"}),
    Row("transformer", "transformer over HTTP, a generation in flight", "transformer.py", twin=True,
        environment=SAME_SUMS, health="/health"),
    Row("two_gpus", "one process on two GPUs, copies between them", "eager.py", ("--gpus", "2"), gpus=2,
        dump_options=("--allow", "gpu-several")),
    Row("nccl_plain", "two NCCL ranks, plain launcher", "ncclranks.py", ("--launch", "2"), environment=QUIET_NCCL,
        logs=(".0", ".1"), restore_options=("--isolate", "net"), gpus=2),
    Row("nccl_torchrun", "two NCCL ranks, torchrun", "ncclranks.py", launcher=TORCHRUN, environment=QUIET_NCCL,
        logs=(".0", ".1"), restore_options=("--isolate", "net"), gpus=2, io_uring_off=True),
    Row("nccl_defaults", "two NCCL ranks that share memory", "ncclranks.py", ("--launch", "2"),
        environment=SHARING_NCCL, logs=(".0", ".1"), refused=NCCL_SHARES, gpus=2),
)  # fmt: skip

REMAP = Row("remap", "from GPU 0 to GPU 1 and back", "eager.py", gpus=2)

BIG_16 = Row(
    "big_16", "16 GiB, CUDA graph: gpuckpt, --huge-pages, and the plain procedure", "graph.py", ("--gib", "16")
)
BIG_40 = Row("big_40", "40 GiB, CUDA graph", "graph.py", ("--gib", "40"))
BIG_90 = Row("big_90", "90 GiB, more than the host has room for", "eager.py", ("--gib", "90"),
             refused=Refusal(("gpu-copy-room", "disk-space"), ("GiB",)))  # fmt: skip
RATES = "rates"
"""What the host itself can do: the floor under every phase."""

ALL_ROWS = (*ROWS, REMAP, BIG_16, BIG_40, BIG_90)

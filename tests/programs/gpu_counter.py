"""A PyTorch process with a known state: gpu_counter.py LOG GIB [--graph] [--busy SECONDS]

Holds GIB GiB of tensors and appends one line per step, several a second, opening LOG anew each time:

    STEP W_SUM [graph COUNT]

STEP rises by one; W_SUM is the sum of a matrix that changes each step; COUNT is raised on the GPU by a
captured CUDA graph and equals STEP. SIGUSR1 appends 'XSUM A B …': one exact integer checksum per tensor
of the constant memory, taken over all its bytes. --busy makes each step a kernel of about SECONDS.
"""

import argparse
import signal
import time

import torch

CHUNK_ELEMENTS = 1 << 28
"""1 GiB of float32: the largest tensor."""
CLOCK_HERTZ = 1.7e9
"""torch.cuda._sleep counts clock cycles; about right for today's data centre GPUs."""


def fill(gib: float) -> list[torch.Tensor]:
    """Random tensors of at most 1 GiB."""
    left, tensors = int(gib * (1 << 28)), []
    generator = torch.Generator(device="cuda").manual_seed(0)
    while left > 0:
        tensors.append(torch.randn(min(left, CHUNK_ELEMENTS), device="cuda", generator=generator))
        left -= CHUNK_ELEMENTS
    return tensors


def checksum(tensor: torch.Tensor) -> int:
    """The sum of all 32-bit words as integers, weighted by their place in a row: exact, and order matters."""
    words = tensor.view(torch.int32)
    total = 0
    for part in words.split(1 << 24):
        weights = torch.arange(1, part.numel() + 1, device="cuda", dtype=torch.int64)
        total = (total * 31 + int((part.to(torch.int64) * weights).sum().item())) % (1 << 61)
    return total


def capture_counter() -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    """A CUDA graph that raises a counter in GPU memory by one, and the counter."""
    counter = torch.zeros(1, device="cuda", dtype=torch.int64)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        counter.add_(1)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        counter.add_(1)
    counter.zero_()
    return graph, counter


def main(path: str, gib: float, *, with_graph: bool, busy_seconds: float) -> None:
    """Count for ever."""
    tensors = fill(gib)
    matrix = torch.randn(2048, 2048, device="cuda")
    graph, counter = capture_counter() if with_graph else (None, None)

    def append(line: str) -> None:
        with open(path, "a") as log:
            log.write(line + "\n")

    def say_checksums(_signal: int, _frame: object) -> None:
        append("XSUM " + " ".join(str(checksum(tensor)) for tensor in tensors))

    signal.signal(signal.SIGUSR1, say_checksums)
    step = 0
    while True:
        step += 1
        matrix = matrix @ matrix.T
        matrix = matrix / matrix.norm()
        if busy_seconds:
            torch.cuda._sleep(int(busy_seconds * CLOCK_HERTZ))
        if graph is not None:
            graph.replay()
        torch.cuda.synchronize()
        count = f" graph {int(counter.item())}" if counter is not None else ""
        append(f"{step} {matrix.sum().item():.8f}{count}")
        time.sleep(0.1)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("log")
    parser.add_argument("gib", type=float)
    parser.add_argument("--graph", action="store_true")
    parser.add_argument("--busy", type=float, default=0.0)
    options = parser.parse_args()
    main(options.log, options.gib, with_graph=options.graph, busy_seconds=options.busy)

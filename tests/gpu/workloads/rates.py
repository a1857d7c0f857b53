"""How fast this host copies, as JSON: rates.py DIRECTORY (on the file system of the images). Bytes per second, best of three.

Host memory is touched before it is measured, but for `fresh_pages`: the driver's copy and a restore's memory are fresh.
"""

import json
import mmap
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch

SIZE = 2 << 30
ROUNDS = 3


def best(copy: Callable[[], object], size: int = SIZE) -> float:
    seconds = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        copy()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return size / min(seconds)


def side_by_side(work: Callable[[int], object], workers: int) -> Callable[[], None]:
    """The work of so many threads; numpy and os.write let go of the interpreter's lock."""

    def everybody() -> None:
        with ThreadPoolExecutor(workers) as pool:
            list(pool.map(work, range(workers)))

    return everybody


def touch() -> None:
    """A page fault for every page of a private mapping."""
    with mmap.mmap(-1, SIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as area:
        np.frombuffer(area, dtype=np.uint8)[:: mmap.PAGESIZE] = 1


def main() -> None:
    place, cores = Path(sys.argv[1]), len(os.sched_getaffinity(0))
    on_gpu = torch.zeros(SIZE, dtype=torch.uint8, device="cuda")
    pinned = torch.ones(SIZE, dtype=torch.uint8, pin_memory=True)
    source, target = np.ones(SIZE, np.uint8), np.zeros(SIZE, np.uint8)
    part = SIZE // cores

    def copy_part(number: int) -> None:
        np.copyto(target[number * part : (number + 1) * part], source[number * part : (number + 1) * part])

    def write_part(number: int, size: int = part) -> None:
        with (place / f"rate{number}").open("wb", buffering=0) as file:
            for at in range(0, size, 4 << 20):
                file.write(source[at : min(at + (4 << 20), size)])

    rates = {
        "gpu_to_pinned": best(lambda: pinned.copy_(on_gpu)),
        "pinned_to_gpu": best(lambda: on_gpu.copy_(pinned)),
        "gpu_to_pageable": best(lambda: torch.from_numpy(target).copy_(on_gpu)),
        "pageable_to_gpu": best(lambda: on_gpu.copy_(torch.from_numpy(target))),
        "memory_copy_one": best(lambda: np.copyto(target, source)),
        "memory_copy_all": best(side_by_side(copy_part, cores)),
        "image_write_one": best(lambda: write_part(0, SIZE)),
        "image_write_all": best(side_by_side(write_part, cores)),
        "fresh_pages": best(touch),
    }
    for path in place.glob("rate*"):
        path.unlink()
    json.dump({**rates, "cores": cores, "bytes": SIZE}, sys.stdout)


if __name__ == "__main__":
    main()

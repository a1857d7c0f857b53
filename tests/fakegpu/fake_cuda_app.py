"""A program that behaves like a CUDA process on the fake GPU.

    fake_cuda_app.py LOG [--mib N] [--gpu N] [--threads N] [--kernel-ms N] [--device PATH] [--children N] [--fork N]

LOG       one line per kernel: the counter that lives in GPU memory (rising by one). SIGUSR1 appends
          'XSUM HEX', the digest of the GPU memory behind the counter.
LOG.tN    one line per step of plain thread N: its own counter
--device  a device node to hold open beside the GPU memory while the process is not checkpointed; --zombie: an unreaped child
--children  N processes more with a fake GPU of their own (LOG.cN), --fork N idle children without one that
          inherit its descriptors
"""

import argparse
import hashlib
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from device import Device


def append_counter(path: str, sleep_seconds: float) -> None:
    """A plain thread: counts, and says so."""
    log = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    count = 0
    while True:
        count += 1
        os.write(log, b"%d\n" % count)
        time.sleep(sleep_seconds)


def compute(device: Device, log: int, kernel_ms: int) -> None:
    """The thread that uses the GPU."""
    while True:
        os.write(log, b"%d\n" % device.launch(kernel_ms))


def main(options: argparse.Namespace, log_path: str) -> None:
    """Fill the memory, start the threads, serve SIGUSR1."""
    log = os.open(log_path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    device = Device(options.mib << 20, index=options.gpu, device_path=options.device)
    seed = random.Random(log_path)
    for offset in range(8, device.size, 1 << 20):
        device.write(seed.randbytes(min(1 << 20, device.size - offset)), offset)

    def say_checksum(_signal: int, _frame: object) -> None:
        digest = hashlib.sha256(device.read(8, device.size - 8)).hexdigest()
        os.write(log, f"XSUM {digest}\n".encode())

    signal.signal(signal.SIGUSR1, say_checksum)
    for _child in range(options.fork):
        if os.fork() == 0:
            while True:
                signal.pause()
    if options.zombie and os.fork() == 0:
        os._exit(0)
    for index in range(options.threads):
        threading.Thread(target=append_counter, args=(f"{log_path}.t{index}", 0.005), daemon=True).start()
    threading.Thread(target=compute, args=(device, log, options.kernel_ms), daemon=True).start()
    while True:
        signal.pause()


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("log")
    for name, default in (("mib", 8), ("gpu", 0), ("threads", 3), ("kernel-ms", 10), ("children", 0), ("fork", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--device", default="")
    parser.add_argument("--zombie", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    arguments = parse()
    path = arguments.log
    for child in range(arguments.children):
        if os.fork() == 0:
            path = f"{arguments.log}.c{child}"
            break
    main(arguments, path)

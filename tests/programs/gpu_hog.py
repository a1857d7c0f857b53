"""Takes the memory of GPU 0, and no host memory for it. Asked by lines on stdin, answers 'taken FREE' each time:

    leave BYTES    take what is free now, but for BYTES
    pounce BYTES   wait until more than BYTES are free, then take all of it at once

It says 'ready FREE' when it has begun, and ends with its stdin.
"""

import sys
import time

import torch

GRAIN = 64 << 20
QUIET_SECONDS = 0.3


def free() -> int:
    """Bytes free on the GPU, as the driver says."""
    return int(torch.cuda.mem_get_info()[0])


def take(held: list[torch.Tensor], leave: int) -> None:
    """Take all but about `leave` bytes, until nothing more has become free for a moment."""
    quiet_since = time.monotonic()
    while time.monotonic() - quiet_since < QUIET_SECONDS:
        size = (free() - leave) // GRAIN * GRAIN
        while size > 0:
            try:
                held.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
            except torch.OutOfMemoryError:  # what is free is not always free in one piece
                size -= GRAIN
            else:
                quiet_since = time.monotonic()
                break
        time.sleep(0.005)


def main() -> None:
    """Serve stdin."""
    held = [torch.empty(1, device="cuda")]
    print("ready", free(), flush=True)
    for line in sys.stdin:
        what, amount = line.split()
        if what == "pounce":
            while free() <= int(amount):
                time.sleep(0.001)
            take(held, GRAIN)
        else:
            take(held, int(amount))
        print("taken", free(), flush=True)


if __name__ == "__main__":
    main()

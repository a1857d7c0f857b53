"""Memory that changes a little when told: changing.py LOG MEGABYTES

Private memory of random bytes. SIGUSR1 moves everything behind the heap in CRIU's files by an odd number of
pages, maps and unmaps, and rewrites a tenth of the memory. Numbers go into LOG for ever; BROKEN when memory
is not what was written.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import sys
import time
import zlib

PAGE = 4096
LIBC = ctypes.CDLL(None, use_errno=True)
LIBC.sbrk.restype = ctypes.c_void_p
LIBC.sbrk.argtypes = [ctypes.c_ssize_t]


def fresh(size: int) -> mmap.mmap:
    area = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for at in range(0, size, 1 << 20):
        area[at : at + (1 << 20)] = os.urandom(min(1 << 20, size - at))
    return area


def main() -> None:
    log, size = sys.argv[1], int(sys.argv[2]) << 20
    told: list[int] = []
    signal.signal(signal.SIGUSR1, lambda *_: told.append(1))
    area, others = fresh(size), [fresh(3 * PAGE)]
    known = zlib.crc32(area)
    with open(log, "a", buffering=1) as out:
        for number in range(1 << 30):
            if told:
                told.clear()
                LIBC.sbrk(PAGE)
                ctypes.memset(LIBC.sbrk(7 * PAGE), number % 255 + 1, 7 * PAGE)
                others = [fresh(5 * PAGE), fresh(9 * PAGE)]
                first = number % 9 * (size // 10) // PAGE * PAGE
                area[first : first + size // 10] = os.urandom(size // 10)
                known = zlib.crc32(area)
                out.write("CHANGED\n")
            if zlib.crc32(area) != known:
                out.write(f"BROKEN {len(others)}\n")
                return
            out.write(f"{number}\n")
            time.sleep(0.05)


if __name__ == "__main__":
    main()

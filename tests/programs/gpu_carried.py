"""A CUDA process without a framework, so that its image is small enough to be carried: gpu_carried.py LOG MIB

Holds MIB MiB on GPU 0, each MiB filled with one byte of its own, and a counter there. Appends the counter to LOG, opened
anew each time, as it raises it, several times a second. SIGUSR1 appends 'XSUM HEX', the digest of the filled memory.
"""

import ctypes
import hashlib
import signal
import sys
import time
import traceback

MIB = 1 << 20
COUNTER_BYTES = 8


class Gpu:
    """The few functions of libcuda that it takes; cuda.h has their types."""

    def __init__(self) -> None:
        self._cuda = ctypes.CDLL("libcuda.so.1")
        pointer, size = ctypes.c_uint64, ctypes.c_size_t
        self._cuda.cuMemAlloc_v2.argtypes = (ctypes.POINTER(pointer), size)
        self._cuda.cuMemsetD8_v2.argtypes = (pointer, ctypes.c_ubyte, size)
        self._cuda.cuMemcpyDtoH_v2.argtypes = (ctypes.c_void_p, pointer, size)
        self._cuda.cuMemcpyHtoD_v2.argtypes = (pointer, ctypes.c_void_p, size)
        self._cuda.cuDevicePrimaryCtxRetain.argtypes = (ctypes.POINTER(ctypes.c_void_p), ctypes.c_int)
        self._cuda.cuCtxSetCurrent.argtypes = (ctypes.c_void_p,)
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self.call("cuInit", 0)
        self.call("cuDeviceGet", ctypes.byref(device), 0)
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self.call("cuCtxSetCurrent", context)

    def call(self, name: str, *arguments: object) -> None:
        """Call it; anything but success ends this program."""
        code = getattr(self._cuda, name)(*arguments)
        if code:
            raise RuntimeError(f"{name} gave {code}")

    def allocate(self, size: int) -> int:
        """The address of new memory."""
        address = ctypes.c_uint64()
        self.call("cuMemAlloc_v2", ctypes.byref(address), size)
        return int(address.value)


def main(log: str, mebibytes: int) -> None:
    """Count for ever."""
    gpu = Gpu()
    memory, counter = gpu.allocate(mebibytes * MIB), gpu.allocate(COUNTER_BYTES)
    for number in range(mebibytes):
        gpu.call("cuMemsetD8_v2", memory + number * MIB, number % 251, MIB)
    gpu.call("cuMemsetD8_v2", counter, 0, COUNTER_BYTES)
    word, piece = ctypes.c_int64(), ctypes.create_string_buffer(MIB)
    asked: list[int] = []
    signal.signal(signal.SIGUSR1, lambda number, _frame: asked.append(number))
    while True:
        gpu.call("cuMemcpyDtoH_v2", ctypes.byref(word), counter, COUNTER_BYTES)
        word.value += 1
        gpu.call("cuMemcpyHtoD_v2", counter, ctypes.byref(word), COUNTER_BYTES)
        append(log, str(word.value))
        if asked:
            asked.clear()
            digest = hashlib.sha256()
            for number in range(mebibytes):
                gpu.call("cuMemcpyDtoH_v2", piece, memory + number * MIB, MIB)
                digest.update(piece.raw)
            append(log, f"XSUM {digest.hexdigest()}")
        time.sleep(0.2)


def append(log: str, line: str) -> None:
    """One line, at once."""
    with open(log, "a") as file:
        file.write(f"{line}\n")


if __name__ == "__main__":
    try:
        main(sys.argv[1], int(sys.argv[2]))
    except Exception:
        append(sys.argv[1], traceback.format_exc())
        raise

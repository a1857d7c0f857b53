"""The fake GPU as a program sees it: ctypes over libfakedevice.so (device.c)."""

import ctypes
import os


class Device:
    """`size` bytes of memory on GPU `index`; opening it starts the restore thread, as cuInit does."""

    def __init__(self, size: int, *, index: int = 0, device_path: str = "") -> None:
        directory = os.environ["FAKEGPU_DIR"]
        self._library = ctypes.CDLL(f"{directory}/lib/libfakedevice.so")
        for name in ("launch", "read", "write", "open"):
            getattr(self._library, f"fakegpu_{name}").restype = ctypes.c_longlong
        self.size = size
        error = self._library.fakegpu_open(
            os.fsencode(directory), index, ctypes.c_longlong(size), os.fsencode(device_path)
        )
        if error:
            raise OSError(error, os.strerror(error))

    def launch(self, milliseconds: int) -> int:
        """Run a kernel; the counter in the first 8 bytes of the memory after it."""
        return int(self._library.fakegpu_launch(ctypes.c_longlong(milliseconds)))

    def read(self, offset: int, size: int) -> bytes:
        """Copy from the GPU."""
        buffer = ctypes.create_string_buffer(size)
        count = int(self._library.fakegpu_read(buffer, ctypes.c_longlong(offset), ctypes.c_longlong(size)))
        return buffer.raw[: max(count, 0)]

    def write(self, data: bytes, offset: int) -> None:
        """Copy to the GPU."""
        self._library.fakegpu_write(data, ctypes.c_longlong(offset), ctypes.c_longlong(len(data)))

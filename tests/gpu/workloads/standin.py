"""The contract without a GPU: what the matrix's own machinery is tested with.

--child  a child with a log of its own (LOG.child); --watch  an inotify watch on /proc, which no dump takes;
--die N  ends with an error after N steps; --gpu-mib N  words and constant memory lie on the fake GPU of tests/fakegpu
"""

import ctypes
import random
import struct
import subprocess
import sys

import contract

WORDS = 64
PLACE = f"<{WORDS}I"


class Memory:
    """Words and constant memory of the process itself."""

    def __init__(self, size: int) -> None:
        self._words = list(range(WORDS))
        self._constant = random.Random(0).randbytes(size)

    def words(self) -> list[int]:
        return self._words

    def keep(self, words: list[int]) -> None:
        self._words = words

    def digest(self) -> str:
        return contract.sha256(self._constant)


class FakeGpu:
    """The same on the fake GPU: eight bytes are its kernels' counter, then come the words, then what is constant."""

    def __init__(self, size: int) -> None:
        from tests.fakegpu.device import Device  # only where FAKEGPU_DIR names one

        self._device = Device(size)
        self._begin = 8 + struct.calcsize(PLACE)
        self.keep(list(range(WORDS)))
        self._device.write(random.Random(0).randbytes(size - self._begin), self._begin)

    def words(self) -> list[int]:
        return list(struct.unpack(PLACE, self._device.read(8, struct.calcsize(PLACE))))

    def keep(self, words: list[int]) -> None:
        self._device.write(struct.pack(PLACE, *words), 8)

    def digest(self) -> str:
        return contract.sha256(self._device.read(self._begin, self._device.size - self._begin))


def main() -> None:
    parser = contract.parser(gib=0.01)
    parser.add_argument("--child", action="store_true")
    parser.add_argument("--watch", action="store_true")
    parser.add_argument("--no-rule", action="store_true")
    parser.add_argument("--die", type=int, default=0)
    parser.add_argument("--gpu-mib", type=int, default=0)
    options = parser.parse_args()
    if options.child:
        subprocess.Popen([sys.executable, __file__, f"{options.log}.child"])
    if options.watch:
        libc = ctypes.CDLL(None)
        assert libc.inotify_add_watch(libc.inotify_init(), b"/proc/self", 0x2) >= 0
    memory = FakeGpu(options.gpu_mib << 20) if options.gpu_mib else Memory(int(options.gib * (1 << 30)))

    def step(number: int) -> int:
        if options.die and number > options.die:
            raise SystemExit(f"as it was told, after {options.die} steps")
        words = [(contract.A * x + contract.C) & contract.MASK for x in memory.words()]
        memory.keep(words)
        return sum(words) & contract.MASK

    log = contract.Log(options.log, 0 if options.no_rule else WORDS)
    contract.run(log, step, memory.digest)


if __name__ == "__main__":
    main()

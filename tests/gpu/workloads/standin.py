"""The contract without a GPU: what the matrix's own machinery is tested with.

--child  a child with a log of its own (LOG.child); --watch  an inotify watch on /proc, which no dump takes;
--die N  ends with an error after N steps; --start-late SECONDS
"""

import ctypes
import random
import subprocess
import sys
import time

import contract


def main() -> None:
    parser = contract.parser(gib=0.01)
    parser.add_argument("--child", action="store_true")
    parser.add_argument("--watch", action="store_true")
    parser.add_argument("--no-rule", action="store_true")
    parser.add_argument("--die", type=int, default=0)
    parser.add_argument("--start-late", type=float, default=0.0)
    options = parser.parse_args()
    time.sleep(options.start_late)
    if options.child:
        subprocess.Popen([sys.executable, __file__, f"{options.log}.child"])
    if options.watch:
        libc = ctypes.CDLL(None)
        assert libc.inotify_add_watch(libc.inotify_init(), b"/proc/self", 0x2) >= 0
    constant = random.Random(0).randbytes(int(options.gib * (1 << 30)))
    words = list(range(64))

    def step(number: int) -> int:
        if options.die and number > options.die:
            raise SystemExit(f"as it was told, after {options.die} steps")
        words[:] = [(contract.A * x + contract.C) & contract.MASK for x in words]
        return sum(words) & contract.MASK

    log = contract.Log(options.log, 0 if options.no_rule else len(words))
    contract.run(log, step, lambda: contract.sha256(constant))


if __name__ == "__main__":
    main()

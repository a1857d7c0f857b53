"""Numba: a CUDA kernel compiled at the start. Signed words throughout: Numba makes floats of mixed signs."""

import contract
import numpy as np
from numba import cuda

A, C, MASK = np.int64(contract.A), np.int64(contract.C), np.int64(contract.MASK)
THREADS = 256


@cuda.jit
def advance(words):
    at = cuda.grid(1)
    if at < words.size:
        words[at] = (words[at] * A + C) & MASK


def main() -> None:
    options = contract.parser().parse_args()
    constant = cuda.to_device(np.random.default_rng(0).random(int(options.gib * (1 << 27))))
    words = cuda.to_device(np.arange(contract.WORDS, dtype=np.int64))

    def step(_number: int) -> int:
        advance[contract.WORDS // THREADS, THREADS](words)
        return int(words.copy_to_host().sum()) & contract.MASK

    contract.run(
        contract.Log(options.log, contract.WORDS), step, lambda: contract.sha256(constant.copy_to_host().view("u1"))
    )


if __name__ == "__main__":
    main()

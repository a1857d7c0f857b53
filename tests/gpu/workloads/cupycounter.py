"""CuPy: an elementwise kernel that NVRTC compiles at the start."""

import contract
import cupy


def main() -> None:
    options = contract.parser().parse_args()
    constant = cupy.arange(int(options.gib * (1 << 27)), dtype=cupy.int64) * 2654435761
    words = cupy.arange(contract.WORDS, dtype=cupy.int64)
    advance = cupy.ElementwiseKernel(
        "int64 x", "int64 y", f"y = (x * {contract.A}LL + {contract.C}LL) & {contract.MASK}LL", "advance"
    )

    def step(_number: int) -> int:
        advance(words, words)
        return int(words.sum()) & contract.MASK

    contract.run(
        contract.Log(options.log, contract.WORDS), step, lambda: contract.sha256(cupy.asnumpy(constant).view("u1"))
    )


if __name__ == "__main__":
    main()

"""torch.compile and a Triton kernel of its own, taking turns at the steps.

Inductor's pool of compile workers is off (TORCHINDUCTOR_COMPILE_THREADS=1 in the row): it would stay in the tree for the
life of the process, as it does for whoever leaves it on.
"""

import contract
import torch
import torchstate
import triton
import triton.language as tl

BLOCK = 1024


@triton.jit
def advance_kernel(words, A: tl.constexpr, C: tl.constexpr, MASK: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(words + at, (tl.load(words + at) * A + C) & MASK)


@torch.compile
def advanced(words):
    return (words * contract.A + contract.C) & contract.MASK


def main() -> None:
    options = contract.parser().parse_args()
    state = torchstate.State(options.gib)

    def step(number: int) -> int:
        if number % 2:
            state.words.copy_(advanced(state.words))
        else:
            grid = (state.words.numel() // BLOCK,)
            advance_kernel[grid](state.words, contract.A, contract.C, contract.MASK, BLOCK)
        return torchstate.value(state.words)

    contract.run(contract.Log(options.log, contract.WORDS), step, state.digest)


if __name__ == "__main__":
    main()

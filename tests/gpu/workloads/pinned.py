"""Pinned host memory: the state goes through it on its way in and out of the GPU at every step.

The constant memory is pinned too. CUDA has to find both mapped for the GPU again, at the same addresses.
"""

import contract
import torch
import torchstate


def main() -> None:
    options = contract.parser().parse_args()
    state = torchstate.State(options.gib / 2)
    pinned = torch.empty(int(options.gib / 2 * (1 << 28)), pin_memory=True).copy_(state.constant[0])
    landing = torch.empty(contract.WORDS, dtype=torch.int64, pin_memory=True)
    landing.copy_(state.words)

    def step(_number: int) -> int:
        state.words.zero_()
        state.words.copy_(landing, non_blocking=True)
        torchstate.advance(state.words)
        landing.copy_(state.words, non_blocking=True)
        torch.cuda.synchronize()
        return int(landing.sum().item()) & contract.MASK  # summed by the CPU, of what the GPU wrote

    def digest() -> str:
        return f"{state.digest()}-{contract.sha256(pinned.numpy())}"

    contract.run(contract.Log(options.log, contract.WORDS), step, digest)


if __name__ == "__main__":
    main()

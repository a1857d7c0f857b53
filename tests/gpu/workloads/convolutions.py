"""cuBLAS and cuDNN with plans chosen by benchmark: their handles, workspaces and choices have to survive.

Inputs and weights are -1, 0 and 1, so every sum is a small integer whatever the algorithm; rounding takes away what a
transform adds. A product or a convolution that comes out otherwise than at the start breaks the rule.
"""

import contract
import torch
import torchstate


def small(*shape: int) -> torch.Tensor:
    return torch.randint(-1, 2, shape, device="cuda", dtype=torch.float32)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The sum of all elements as integers, weighted by their place."""
    flat = tensor.round().to(torch.int64).flatten()
    return (flat * torch.arange(1, flat.numel() + 1, device="cuda")).sum()


def main() -> None:
    options = contract.parser().parse_args()
    torch.manual_seed(1)
    torch.backends.cudnn.benchmark = True
    state = torchstate.State(options.gib)
    images, kernels = small(8, 64, 56, 56), small(64, 64, 3, 3)
    left, right = small(2048, 2048), small(2048, 2048)

    def computed() -> torch.Tensor:
        return whole(torch.nn.functional.conv2d(images, kernels, padding=1)) + whole(left @ right)

    at_start = computed()

    def step(number: int) -> int:
        state.words.add_(computed() - at_start)  # adds nothing, as long as both libraries compute the same
        return state.step(number)

    contract.run(contract.Log(options.log, contract.WORDS), step, state.digest)


if __name__ == "__main__":
    main()

"""A training loop with dropout and Adam whose losses, as hexadecimal floats, equal those of an uninterrupted run.

No rule: the twin's lines are what it is compared with, so the optimiser's state, the generator's and the weights all count.
"""

import os

os.environ.setdefault(
    "CUBLAS_WORKSPACE_CONFIG", ":4096:8"
)  # cuBLAS is deterministic only with a workspace of fixed size

import contract
import torch
import torchstate


def main() -> None:
    options = contract.parser(gib=0.25).parse_args()
    torch.manual_seed(7)
    torch.use_deterministic_algorithms(True)
    width = 1024
    model = torch.nn.Sequential(
        torch.nn.Linear(width, 4 * width),
        torch.nn.GELU(),
        torch.nn.Dropout(0.1),
        torch.nn.Linear(4 * width, width),
    ).cuda()
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-4)
    constant = torchstate.constant(options.gib)

    def step(_number: int) -> str:
        batch = torch.randn(256, width, device="cuda")
        loss = torch.nn.functional.mse_loss(model(batch), batch.roll(1, dims=1))
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        return float(loss.item()).hex()

    contract.run(contract.Log(options.log), step, lambda: torchstate.checksum(constant))


if __name__ == "__main__":
    main()

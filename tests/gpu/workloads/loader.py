"""A DataLoader whose workers make each batch; a wrong, lost or repeated batch breaks the rule.

--method spawn   workers that started anew: nothing of CUDA in them
--method fork    workers forked after CUDA began: they inherit the GPU's files without being able to be suspended
--method early   workers forked before the first CUDA call
"""

import contract
import torch
import torchstate

BATCH = 64
SAMPLES = BATCH * 1_000_000


class Numbers(torch.utils.data.Dataset):
    """Sample n is 256 times n."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((256,), index, dtype=torch.int64)


def batches(method: str):
    """Two workers, in order."""
    context = "fork" if method == "early" else method
    loader = torch.utils.data.DataLoader(
        Numbers(), batch_size=BATCH, num_workers=2, prefetch_factor=2, multiprocessing_context=context
    )
    return iter(loader)


def expected(number: int) -> int:
    """The sum of batch `number` (from 1): 256 times the sum of its 64 sample numbers."""
    first = (number - 1) * BATCH
    return 256 * (BATCH * first + BATCH * (BATCH - 1) // 2)


def main() -> None:
    parser = contract.parser()
    parser.add_argument("--method", choices=["spawn", "fork", "early"], required=True)
    options = parser.parse_args()
    found = batches(options.method) if options.method == "early" else None
    state = torchstate.State(options.gib)
    found = found or batches(options.method)

    def step(number: int) -> int:
        batch = next(found).cuda()
        state.words.add_(batch.sum() - expected(number))  # adds nothing, unless the batch is another one
        return state.step()

    contract.run(contract.Log(options.log, contract.WORDS), step, state.digest)


if __name__ == "__main__":
    main()

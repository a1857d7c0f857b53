"""An all-reduce loop of NCCL ranks, one GPU each; rank n writes LOG.n.

    torchrun --nproc-per-node 2 ncclranks.py LOG        ranks out of torchrun's environment
    ncclranks.py LOG --launch 2                         a plain parent that starts the ranks; they meet through a file

Each rank holds the whole state; a step adds it up over all ranks and divides by their number, so a rank that fell behind
or computes from other memory breaks the rule in every log.
"""

import os
import subprocess
import sys

import contract
import torch
import torchstate
from torch import distributed


def launch(log: str, ranks: int) -> int:
    """The plain launcher: waits for its ranks, as a shell would. Through a file: PyTorch's TCPStore opens an io_uring."""
    environment = {**os.environ, "WORLD_SIZE": str(ranks)}
    argv = [sys.executable, __file__, log]
    started = [
        subprocess.Popen(argv, env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(ranks)
    ]
    return max(child.wait() for child in started)


def main() -> int:
    parser = contract.parser()
    parser.add_argument("--launch", type=int, default=0)
    options = parser.parse_args()
    if options.launch:
        return launch(options.log, options.launch)
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    by_file = "MASTER_ADDR" not in os.environ
    distributed.init_process_group(
        "nccl", init_method=f"file://{options.log}.meet" if by_file else "env://", rank=rank, world_size=ranks
    )
    state = torchstate.State(options.gib, device=f"cuda:{os.environ['LOCAL_RANK']}")

    def step(_number: int) -> int:
        torchstate.advance(state.words)
        distributed.all_reduce(state.words)
        state.words.div_(ranks, rounding_mode="floor")
        return torchstate.value(state.words)

    contract.run(contract.Log(f"{options.log}.{rank}", contract.WORDS), step, state.digest)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Three streams chained by events, with work in flight all the time: a lock has to wait for it, and events must still fire.

Each step is queued one step ahead of the one that is waited for; in between lies a kernel of about 50 ms.
"""

import contract
import torch
import torchstate

BUSY_CYCLES = 80_000_000
"""torch.cuda._sleep counts clock cycles: about 50 ms on today's data centre GPUs."""


def main() -> None:
    options = contract.parser().parse_args()
    state = torchstate.State(options.gib)
    busy, work, copy = (torch.cuda.Stream() for _ in range(3))
    sums = [torch.zeros(1, dtype=torch.int64, pin_memory=True) for _ in range(2)]
    queued: list[torch.cuda.Event] = []
    torch.cuda.synchronize()

    def queue(number: int) -> None:
        """One step: a long kernel, then the rule, then its sum, each on a stream of its own."""
        with torch.cuda.stream(busy):
            torch.cuda._sleep(BUSY_CYCLES)
        handed = torch.cuda.Event()
        handed.record(busy)
        work.wait_event(handed)
        work.wait_stream(copy)  # the sum before reads the same words
        with torch.cuda.stream(work):
            torchstate.advance(state.words)
        copy.wait_stream(work)
        with torch.cuda.stream(copy):
            sums[number % 2].copy_(state.words.sum().reshape(1), non_blocking=True)
        done = torch.cuda.Event(blocking=True)  # waits without spinning
        done.record(copy)
        queued.append(done)

    queue(1)

    def step(number: int) -> int:
        queue(number + 1)
        queued.pop(0).synchronize()
        return int(sums[number % 2].item()) & contract.MASK

    contract.run(contract.Log(options.log, contract.WORDS), step, state.digest)


if __name__ == "__main__":
    main()

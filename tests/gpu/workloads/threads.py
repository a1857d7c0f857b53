"""Eight threads, each with a stream and a part of the state of its own; all of them are in CUDA calls most of the time."""

import threading

import contract
import torch
import torchstate

THREADS = 8


def main() -> None:
    options = contract.parser().parse_args()
    part = contract.WORDS // THREADS
    state = torchstate.State(options.gib, words=0)
    parts = [torch.arange(number * part, (number + 1) * part, device="cuda") for number in range(THREADS)]
    values = [0] * THREADS
    torch.cuda.synchronize()
    begin, end = threading.Barrier(THREADS + 1), threading.Barrier(THREADS + 1)

    def work(number: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            while True:
                begin.wait()
                torchstate.advance(parts[number])
                values[number] = torchstate.value(parts[number])
                end.wait()

    for number in range(THREADS):
        threading.Thread(target=work, args=(number,), daemon=True).start()

    def step(_number: int) -> int:
        begin.wait()
        end.wait()
        return sum(values) & contract.MASK

    contract.run(contract.Log(options.log, contract.WORDS), step, state.digest)


if __name__ == "__main__":
    main()

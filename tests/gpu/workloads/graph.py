"""PyTorch with a captured CUDA graph: replaying it is the only thing that changes the state."""

import contract
import torch
import torchstate


def main() -> None:
    options = contract.parser().parse_args()
    state = torchstate.State(options.gib)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # a warm-up on a stream of its own, as PyTorch asks for
        torchstate.advance(state.words.clone())
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torchstate.advance(state.words)

    def step(_number: int) -> int:
        graph.replay()
        return torchstate.value(state.words)

    contract.run(contract.Log(options.log, contract.WORDS), step, state.digest)


if __name__ == "__main__":
    main()

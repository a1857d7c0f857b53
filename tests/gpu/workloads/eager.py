"""PyTorch, one kernel after the other. With --gpus 2 the constant memory lies on both of them."""

import contract
import torchstate


def main() -> None:
    parser = contract.parser()
    parser.add_argument("--gpus", type=int, default=1)
    options = parser.parse_args()
    state = torchstate.State(options.gib)
    others = [torchstate.State(options.gib, device=f"cuda:{number}") for number in range(1, options.gpus)]

    def step(number: int) -> int:
        for other in others:  # over to the other GPU, one step there, and back
            other.words.copy_(state.words)
            torchstate.advance(other.words)
            state.words.copy_(other.words)
        return torchstate.value(state.words) if others else state.step(number)

    def digest() -> str:
        return "-".join(one.digest() for one in (state, *others))

    # A step goes over every further GPU once, so the rule holds with two GPUs as with one.
    contract.run(contract.Log(options.log, contract.WORDS), step, digest)


if __name__ == "__main__":
    main()

"""Two processes on one GPU: a parent, and a child started anew, each with CUDA and a log of its own (LOG, LOG.child)."""

import subprocess
import sys

import contract
import torchstate


def main() -> None:
    parser = contract.parser()
    parser.add_argument("--alone", action="store_true")
    options = parser.parse_args()
    child = None
    if not options.alone:
        child = subprocess.Popen(
            [sys.executable, __file__, f"{options.log}.child", "--alone", "--gib", str(options.gib)]
        )
    state = torchstate.State(options.gib)
    contract.run(contract.Log(options.log, contract.WORDS), state.step, state.digest)
    if child is not None:
        child.terminate()
        child.wait()


if __name__ == "__main__":
    main()

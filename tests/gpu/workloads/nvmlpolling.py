"""NVML held open and polled beside CUDA in one process, as monitors inside a training job do.

--child: a child without CUDA polls too, as an exporter started by the job would. It holds the GPU's files, and the driver
suspends it as it does a CUDA process (580.159.04).
"""

import subprocess
import sys
import time

import contract
import pynvml


def poll(handle: object) -> int:
    """Memory in use, and the total: what a monitor asks for."""
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    assert 0 < memory.used <= memory.total, memory
    return memory.total


def open_nvml() -> object:
    pynvml.nvmlInit()
    return pynvml.nvmlDeviceGetHandleByIndex(0)


def poll_for_ever() -> None:
    handle = open_nvml()
    while True:
        poll(handle)
        time.sleep(0.1)


def main() -> None:
    if "--only-nvml" in sys.argv:
        poll_for_ever()
    parser = contract.parser()
    parser.add_argument("--child", action="store_true")
    options = parser.parse_args()
    if options.child:
        child = subprocess.Popen([sys.executable, __file__, "--only-nvml"])
    import torchstate  # only here: the child shall have no CUDA, and has its files open before the first step

    handle = open_nvml()
    total = poll(handle)
    state = torchstate.State(options.gib)

    def step(number: int) -> int:
        state.words.add_(poll(handle) - total)  # adds nothing, as long as NVML tells of the same GPU
        return state.step(number)

    contract.run(contract.Log(options.log, contract.WORDS), step, state.digest)
    if options.child:
        child.terminate()


if __name__ == "__main__":
    main()

"""What one does without gpuckpt, as NVIDIA's cuda-checkpoint README says it, with the driver's functions in place of its program.

    plainprocedure.py dump PID DIR --criu PROGRAM       lock and checkpoint, `criu dump`
    plainprocedure.py restore PID DIR --criu PROGRAM    `criu restore`, CUDA restore and unlock

Prints the seconds of each phase as JSON. Nothing is digested, compressed, verified or synced, and nothing holds the process
between the steps. A dump that fails resumes it. One CUDA process only.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

NOT_INITIALIZED = 3
LOCK_MILLISECONDS = 60_000
LIMIT_SECONDS = 200


class Driver:
    """libcuda's checkpoint functions. Every argument is 64 zeroed bytes; a lock's first word is its limit."""

    def __init__(self) -> None:
        self._cuda = ctypes.CDLL("libcuda.so.1")

    def call(self, action: str, pid: int, first_word: int = 0) -> None:
        """One step; RuntimeError with the driver's code."""
        argument = (ctypes.c_uint32 * 16)(first_word)
        function = getattr(self._cuda, f"cuCheckpointProcess{action}")
        code = function(pid, ctypes.byref(argument))
        if code == NOT_INITIALIZED and action == "Restore":  # persistence mode is off
            self._cuda.cuInit(0)
            code = function(pid, ctypes.byref(argument))
        if code:
            raise RuntimeError(f"CUDA {action} of {pid}: {code}")


def criu(program: str, verb: str, directory: Path, *options: str) -> None:
    """CRIU without plugins; RuntimeError with the end of its log."""
    (directory / "no-plugins").mkdir(exist_ok=True)
    argv = [program, verb, "--no-default-config", "--images-dir", directory, "--log-file", f"{verb}.log", "-v2"]
    argv += ["--libdir", directory / "no-plugins", "--link-remap", "--manage-cgroups=ignore", *options]
    done = subprocess.run([*map(str, argv)], stdin=subprocess.DEVNULL, timeout=LIMIT_SECONDS)
    if done.returncode:
        log = directory / f"{verb}.log"
        raise RuntimeError(f"criu {verb}: {done.returncode}\n{log.read_text()[-1500:] if log.exists() else 'no log'}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("verb", choices=["dump", "restore"])
    parser.add_argument("pid", type=int)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--criu", required=True)
    options = parser.parse_args()
    driver, seconds = Driver(), {}

    @contextlib.contextmanager
    def phase(name: str) -> Iterator[None]:
        began = time.monotonic()
        yield
        seconds[name] = time.monotonic() - began

    if options.verb == "dump":
        options.directory.mkdir(mode=0o700)
        with phase("lock"):
            driver.call("Lock", options.pid, LOCK_MILLISECONDS)
        try:
            with phase("gpu_to_host"):
                driver.call("Checkpoint", options.pid)
            with phase("capture"):
                criu(
                    options.criu,
                    "dump",
                    options.directory,
                    "--tree",
                    str(options.pid),
                    "--ghost-limit",
                    "1G",
                    "--timeout",
                    "200",
                )
        except RuntimeError:
            for action in ("Restore", "Unlock"):
                with contextlib.suppress(RuntimeError):
                    driver.call(action, options.pid)
            raise
    else:
        with phase("criu"):
            criu(options.criu, "restore", options.directory, "--restore-detached")
        with phase("host_to_gpu"):
            driver.call("Restore", options.pid)
            driver.call("Unlock", options.pid)
    json.dump(seconds, sys.stdout)


if __name__ == "__main__":
    main()

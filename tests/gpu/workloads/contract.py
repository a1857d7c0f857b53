"""What every workload of the matrix has in common, so that one test can judge all of them.

    WORKLOAD LOG [OPTIONS]

It appends to LOG, opening it anew for each line:

    RULE N              once, where the values follow the rule below: the number of words in the state
    STEP n VALUE        one per step; n rises by one
    DIGEST HEX          asked for by creating LOG.ask, which it removes: all memory that never changes

The rule: the state is N words on the GPU, and each step makes x into (A * x + C) mod 2^32 for all of them. VALUE is their
sum mod 2^32, so each line follows from the one before it: V' = (A * V + N * C) mod 2^32. A step that was lost, repeated or
computed from other memory than the last one breaks that. Workloads without a RULE are compared with a twin that nobody
interrupts.

SIGTERM ends it.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import signal
import time
from collections.abc import Callable

A, C, MASK = 1664525, 1013904223, 0xFFFFFFFF
"""Numerical Recipes' generator. With words below 2^32, A * x + C stays below 2^53: exact in a signed 64-bit word."""
WORDS = 1 << 20
PAUSE_SECONDS = 0.05


def follows(value: int, words: int) -> int:
    """The value of the next step."""
    return (A * value + words * C) & MASK


def parser(gib: float = 0.5) -> argparse.ArgumentParser:
    """LOG and --gib, the constant memory; a workload adds its own options."""
    made = argparse.ArgumentParser()
    made.add_argument("log")
    made.add_argument("--gib", type=float, default=gib)
    return made


def append(log: str, line: str) -> None:
    """One write: a line is whole or not there."""
    with open(log, "a") as file:
        file.write(line + "\n")


def sha256(*pieces: object) -> str:
    """The digest of what has a buffer, in this order."""
    total = hashlib.sha256()
    for piece in pieces:
        total.update(memoryview(piece).cast("B"))
    return total.hexdigest()


class Log:
    """The log of one process: steps, and digests when they are asked for."""

    def __init__(self, path: str, words: int = 0) -> None:
        self.path = path
        self._ask = f"{path}.ask"
        self._step = 0
        if words:
            append(path, f"RULE {words}")

    def step(self, value: object) -> None:
        """Say that one more step is done."""
        self._step += 1
        append(self.path, f"STEP {self._step} {value}")

    def answer(self, digest: Callable[[], str]) -> None:
        """Say the digest if somebody asks."""
        if os.path.exists(self._ask):
            os.unlink(self._ask)
            append(self.path, f"DIGEST {digest()}")


def run(
    log: Log, step: Callable[[int], object], digest: Callable[[], str], pause_seconds: float = PAUSE_SECONDS
) -> None:
    """step(n) for n = 1, 2, 3 …, each one's value into the log, until SIGTERM."""
    ended: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _frame: ended.append(number))
    number = 0
    while not ended:
        number += 1
        log.step(step(number))
        log.answer(digest)
        time.sleep(pause_seconds)

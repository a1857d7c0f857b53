"""What is done at each turn of the soak: a pure function of seed and number, so that any turn can be done again."""

from __future__ import annotations

import random
import signal
from dataclasses import dataclass
from typing import Literal

Verb = Literal["dump", "restore"]
Target = Literal["nothing", "main", "owner", "both", "criu"]

BLOCK = 10
"""So many turns are done on one tree, one after the other."""

KINDS = ("tcp", "pair", "one", "stopped")


@dataclass(frozen=True, slots=True)
class Blow:
    """What befalls a run: a signal to somebody, once or more often, perhaps taken back."""

    name: str
    target: Target
    number: int = signal.SIGKILL
    times: int = 1
    patient: bool = False
    """SIGSTOP: the stopped one is continued only when the owner has done what it does about a silent main."""


BLOWS: dict[Blow, int] = {
    Blow("nothing", "nothing"): 8,
    Blow("kill -9 of main", "main"): 20,
    Blow("kill -9 of the owner", "owner"): 16,
    Blow("kill -9 of both", "both"): 14,
    Blow("SIGTERM once", "main", signal.SIGTERM): 8,
    Blow("SIGTERM twice", "main", signal.SIGTERM, 2): 5,
    Blow("SIGINT once", "main", signal.SIGINT): 8,
    Blow("SIGINT twice", "main", signal.SIGINT, 2): 5,
    Blow("SIGHUP once", "main", signal.SIGHUP): 3,
    Blow("kill -9 of CRIU", "criu"): 7,
    Blow("main stopped for a while", "main", signal.SIGSTOP): 5,
    Blow("main stopped for good", "main", signal.SIGSTOP, patient=True): 1,
}
"""Every blow and its weight."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One dump or restore: of a tree that lies in an image a restore, else a dump unless `restore` says otherwise."""

    number: int
    kind: str
    plain: bool
    leave_running: bool
    restore: bool
    """Save the tree undisturbed, then restore it."""
    blow: Blow
    moment: float
    """0 to 1: the part of the measured length that passes before the blow."""
    main_first: bool
    """With `both`."""
    pause_seconds: float
    """Between two presses, and before a stopped main is continued."""

    def dump_options(self) -> list[str]:
        """What the command line of a dump has."""
        return ["--plain"] * self.plain + ["--leave-running"] * self.leave_running

    def restore_options(self) -> list[str]:
        """What the command line of a restore has."""
        return ["--plain"] * self.plain


def turn(seed: int, number: int) -> Turn:
    """The turn with this number; numbers of one block share tree and way of dumping."""
    block = number // BLOCK
    rng = random.Random(f"{seed}:{number}")
    (blow,) = rng.choices(list(BLOWS), weights=list(BLOWS.values()))
    return Turn(
        number=number,
        kind=KINDS[block % len(KINDS)],
        plain=block % 3 == 2,
        leave_running=rng.random() < 0.3,
        restore=rng.random() < 0.25,
        blow=blow,
        moment=rng.random(),
        main_first=rng.random() < 0.5,
        pause_seconds=rng.uniform(0.02, 1.0) if blow.number == signal.SIGSTOP else rng.uniform(0.005, 0.1),
    )

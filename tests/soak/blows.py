"""A gpuckpt run, and the blow that it gets at its moment."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from dataclasses import dataclass

from tests import harness
from tests.faults import arena
from tests.faults.arena import Shot
from tests.soak.plan import Turn

STEP_SECONDS = 0.002
SILENCE_SECONDS = 60.0
"""Longer than an owner waits for a main that says nothing."""


@dataclass(frozen=True, slots=True)
class Length:
    """Seconds of one undisturbed run: all of it, from the owner's start, and CRIU's own life."""

    whole: float
    owner: float
    criu: float


def measure(*arguments: object) -> Length:
    """Do one undisturbed run and see how long its parts take."""
    shot = Shot(*arguments, start_new_session=True)
    owner = _await_pid(shot, lambda: arena.owner_of(shot.main.pid))
    owner_at = time.monotonic()
    criu = _await_pid(shot, lambda: arena.criu_of(owner))
    criu_at = time.monotonic()
    while criu is not None and harness.alive(criu):
        time.sleep(STEP_SECONDS)
    criu_ended = time.monotonic()
    answer = shot.answer()
    ended = time.monotonic()
    assert answer is not None and answer.status == 0, answer and (answer.error, answer.stderr)
    return Length(ended - shot.began, ended - owner_at, criu_ended - criu_at)


def strike(shot: Shot, turn: Turn, length: Length) -> bool:
    """Wait for the moment and deal the blow; False when there was nothing left to hit, or nothing is to be hit."""
    target = turn.blow.target
    if target == "nothing":
        return False
    if target == "main":
        _wait(shot, length.whole * turn.moment)
        return _hit_main(shot, turn)
    owner = _await_pid(shot, lambda: arena.owner_of(shot.main.pid))
    if target == "criu":
        criu = _await_pid(shot, lambda: arena.criu_of(owner))
        _wait(shot, length.criu * turn.moment)
        return arena.kill(criu)
    _wait(shot, length.owner * turn.moment)
    victims = [owner] if target == "owner" else [shot.main.pid, owner] if turn.main_first else [owner, shot.main.pid]
    killed = [arena.kill(victim) for victim in victims]
    return all(killed)


def _hit_main(shot: Shot, turn: Turn) -> bool:
    """As a terminal does it: to main's whole process group."""
    if not shot.running:
        return False
    owner = arena.owner_of(shot.main.pid) if turn.blow.patient else None
    for press in range(turn.blow.times):
        if press:
            time.sleep(turn.pause_seconds)
        if shot.running:
            _signal_group(shot, turn.blow.number)
    if turn.blow.number == signal.SIGSTOP:
        _continue_later(shot, turn, owner)
    return True


def _continue_later(shot: Shot, turn: Turn, owner: int | None) -> None:
    """A person says `fg`: after a while, or when nothing happens any more."""
    deadline = time.monotonic() + (SILENCE_SECONDS if owner else turn.pause_seconds)
    while time.monotonic() < deadline and harness.alive(shot.main.pid) and (owner is None or harness.alive(owner)):
        time.sleep(0.05)
    _signal_group(shot, signal.SIGCONT)


def _signal_group(shot: Shot, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(shot.main.pid, number)


def _wait(shot: Shot, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while (left := deadline - time.monotonic()) > 0 and shot.running:
        time.sleep(min(left, 0.02))


def _await_pid(shot: Shot, find) -> int | None:
    """The pid as soon as it is there; None when the run ended before."""
    while shot.running:
        if pid := find():
            return pid
        time.sleep(STEP_SECONDS)
    return None

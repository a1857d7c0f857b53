"""Sixty turns of the soak: the same code and seed as `make soak`, on the first trees only."""

from __future__ import annotations

import pytest

from tests.soak.plan import BLOWS, turn
from tests.soak.soaking import Soak

SEED = 7
COUNT = 60


@pytest.mark.criu
@pytest.mark.timeout(900)
def test_sixty_turns_lose_nothing(tmp_path_factory):
    soak = Soak(tmp_path_factory.mktemp("soak"), SEED, kinds=("tcp",))
    try:
        soak.begin()
        for number in range(COUNT):
            soak.run(number)
    finally:
        soak.end()
    print(f"\n{dict(sorted(soak.counts.items()))}")
    assert soak.wrongs == []
    assert soak.counts["dumps"] + soak.counts["restores"] == COUNT
    assert soak.counts["restores"] >= COUNT // 6


def test_every_blow_is_dealt_and_a_turn_is_always_the_same():
    turns = [turn(SEED, number) for number in range(1000)]
    assert {one.blow for one in turns} == set(BLOWS)
    assert turns == [turn(SEED, number) for number in range(1000)]
    moments = sorted(one.moment for one in turns)
    assert all(abs(moment - place / 1000) < 0.06 for place, moment in enumerate(moments))

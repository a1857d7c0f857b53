"""A migration with something killed -9 in it: one copy of the job runs, or one is held and one command brings it back.

The cells where the order of two steps could be wrong; `make crossings` has all of them.
"""

from __future__ import annotations

import pytest

from tests import twohosts
from tests.faults import arena
from tests.faults.crossing import Crossing, cross

pytestmark = [pytest.mark.criu, pytest.mark.timeout(600)]

CELLS = (
    ("ssh", "transferring"),
    ("far serve", "prepared"),
    ("source both", "prepared"),
    ("source owner", "given"),
    ("source main", "go sent"),
    ("far owner", "go sent"),
    ("far serve", "running"),
)


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    """Two hosts for all cells."""
    why = twohosts.missing()
    if why:
        pytest.skip(why)
    made = twohosts.TwoHosts(tmp_path_factory.mktemp("hosts"))
    yield made
    made.end()


@pytest.mark.parametrize("cell", CELLS, ids=" at ".join)
def test_exactly_one_copy_is_left(hosts, cell):
    outcome = cross(hosts, CELLS.index(cell), *cell)
    print(outcome.row())
    assert outcome.hit, outcome
    assert outcome.right, outcome


def test_a_job_that_a_killed_criu_took_along_comes_back_from_its_image_there(hosts):
    crossing = Crossing(hosts, len(CELLS) + 1)
    crossing.start()
    try:
        assert crossing.until("preparing")
        assert [arena.kill(pid) for pid in crossing.of("source criu")] == [True]
        status, words = crossing.answer()
        crossing.wait_quiet()
        if crossing.state(hosts.a) == "none":
            assert status == 31
            place = words.partition("`gpuckpt restore ")[2].partition("`")[0]
            restored = hosts.b.gpuckpt("restore", place)
            assert restored.status == 0, (words, restored.error)
            assert crossing.state(hosts.b) == "runs"
        else:
            assert (status, crossing.state(hosts.a)) == (30, "runs")
    finally:
        crossing.end()


def test_a_go_without_an_answer_leaves_the_job_held_and_says_both_ways_out(hosts):
    outcome = cross(hosts, len(CELLS), "sshd", "go sent")
    assert outcome.status == 51
    assert (outcome.here, outcome.there) == ("held", "runs")  # it came alive there, and nobody could say so
    assert "`kill -KILL " in outcome.words
    assert "`gpuckpt restore --tree " in outcome.words

"""What survivors of a migration decide by: the journal of the source, and the one decision about the copy."""

from __future__ import annotations

import secrets
import threading
from pathlib import Path

import pytest

from gpuckpt.model.facts import ProcessId
from gpuckpt.owner import decision
from gpuckpt.owner.journal import PastRun
from gpuckpt.owner.repairing import duty

ORDER = {"act": "order", "kind": "dump", "order": {}}


@pytest.mark.parametrize(
    ("acts", "wanted"),
    [
        ((), "resume"),
        (("given",), "hold"),
        (("given", "held"), "hold"),
        (("given", "taken-back"), "resume"),
        (("given", "runs-there"), "finish-ending"),
        (("given", "runs-there", "held"), "hold"),
        (("given", "runs-there", "committed"), "finish-ending"),
        (("given", "committed"), "finish-ending"),
        (("committed",), "finish-ending"),
    ],
)
def test_the_journal_decides_what_becomes_of_a_tree_that_was_given_away(acts, wanted):
    assert duty(PastRun([ORDER, *({"act": act} for act in acts)]), Path("/nonexistent")) == wanted


@pytest.fixture
def transaction():
    name = secrets.token_hex(16)
    yield name
    decision.forget(name)


def test_the_first_decision_stands(transaction):
    ids = (ProcessId(7, 1234), ProcessId(8, 1235))
    assert decision.decide(transaction, "go", ids) == decision.Decision("go", ids)
    assert decision.decide(transaction, "cancelled") == decision.Decision("go", ids)
    decision.forget(transaction)
    assert decision.decide(transaction, "cancelled").word == "cancelled"
    assert decision.decide(transaction, "go", ids).word == "cancelled"


def test_of_many_who_decide_at_once_all_hear_the_same(transaction):
    heard: list[str] = []
    begin = threading.Barrier(16)

    def act(number: int) -> None:
        begin.wait()
        heard.append(decision.decide(transaction, "go" if number % 2 else "cancelled").word)

    threads = [threading.Thread(target=act, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(heard) == 16
    assert len(set(heard)) == 1


@pytest.mark.parametrize("name", ["", "..", "a/b", "A" * 32, "0" * 15, "0" * 65, "0" * 32 + "\n"])
def test_what_is_no_name_of_a_migration_is_refused(name):
    with pytest.raises(ValueError):
        decision.decide(name, "go")
    with pytest.raises(ValueError):
        decision.forget(name)

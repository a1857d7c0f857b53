"""Questions asked in threads: their answers, their errors, and what is left of them when a command fails meanwhile."""

import threading
import time

import pytest

from gpuckpt.system import asking
from gpuckpt.system.asking import meanwhile


def test_answer_and_error_come_from_the_question():
    with meanwhile(lambda: 7) as answer, meanwhile(lambda: {}["x"]) as wrong:
        assert answer() == 7
        with pytest.raises(KeyError):
            wrong()


def test_no_question_outlives_a_command_that_fails_meanwhile():
    ended = threading.Event()

    def ask() -> None:
        time.sleep(0.3)
        ended.set()

    with pytest.raises(ZeroDivisionError), meanwhile(ask):
        1 / 0  # noqa: B018
    assert ended.is_set()


def test_one_that_hangs_does_not_keep_the_command(monkeypatch):
    monkeypatch.setattr(asking, "LEAVE_SECONDS", 0.2)
    over = threading.Event()
    began = time.monotonic()
    with pytest.raises(ZeroDivisionError), meanwhile(over.wait):
        1 / 0  # noqa: B018
    assert time.monotonic() - began < 10
    over.set()

"""A signal explains only what it can have caused."""

from __future__ import annotations

import signal

import pytest

from gpuckpt.flows.interruption import Interruption
from gpuckpt.flows.reporting import reported
from gpuckpt.model.errors import Interrupted, MachineLacks, NotFound, Refused


def report_of(error, caught):
    interruption = Interruption(None)
    interruption.caught = caught

    def fails():
        raise error

    return reported("dump", fails, interruption)


def test_what_seems_to_be_lacking_after_a_signal_is_the_signals():
    report = report_of(MachineLacks("CRIU does not answer", "install CRIU"), signal.SIGTERM)
    assert (report.outcome, report.process) == ("failed", "untouched")
    assert isinstance(report.error, Interrupted)
    assert "SIGTERM" in report.error.message


@pytest.mark.parametrize(
    "error",
    [
        Refused("--pre-dump exited with 1", "--post-dump was ended: SIGTERM came"),
        NotFound("the tree of 42 has ended", "restore its newest image", process="ended"),
        MachineLacks("the run directory cannot be made", process="running"),
    ],
)
def test_other_failures_keep_their_cause(error):
    report = report_of(error, signal.SIGTERM)
    assert report.error is error
    assert report.process == error.process


def test_without_a_signal_nothing_is_the_signals():
    error = MachineLacks("CRIU is missing", "install CRIU")
    assert report_of(error, None).error is error

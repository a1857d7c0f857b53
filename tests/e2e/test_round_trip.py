"""The main job: a program is saved, ends, and goes on where it stopped."""

from __future__ import annotations

import pytest

from tests import harness
from tests.harness import gpuckpt

pytestmark = pytest.mark.criu


def test_a_program_goes_on_without_gap_or_repeat(work, jobs):
    job = jobs.python("counter.py", work / "log", 20)
    harness.wait_for_count(work / "log", 3)
    dumped = gpuckpt("dump", "--tree", job.pid, work / "img")
    assert (dumped.status, dumped.report["outcome"], dumped.report["process"]) == (0, "ok", "ended")
    job.wait(10)
    at_dump = harness.numbers(work / "log")[-1]
    restored = gpuckpt("restore", work / "img", "--settle", 0.5)
    assert (restored.status, restored.report["outcome"], restored.report["process"]) == (0, "ok", "restored")
    harness.wait_for_count(work / "log", at_dump + 5)
    harness.assert_gapless(work / "log")

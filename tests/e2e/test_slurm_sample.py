"""The sample script for Slurm, run as Slurm runs it: started, signalled before the end, started again.

Slurm is not here: a scontrol on PATH stands in for it and notes what it was asked. That the requeue ends the job
and starts the script anew is done by the test.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from tests import harness
from tests.e2e import rounds
from tests.harness import PROGRAMS

pytestmark = pytest.mark.criu

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "man" / "examples" / "gpuckpt.slurm"


@pytest.fixture
def slurm(work, jobs):
    """Start the script as a batch job of number 4711."""
    (work / "bin").mkdir()
    scontrol = work / "bin" / "scontrol"
    scontrol.write_text(f"#!/bin/sh\necho \"$@\" >>'{work}/asked'\n")
    scontrol.chmod(0o755)
    (work / "series").mkdir(mode=0o700)
    env = {
        "PATH": f"{work}/bin:/usr/bin:/bin",
        "PYTHONPATH": str(ROOT),
        "SLURM_JOB_ID": "4711",
        "SLURM_SUBMIT_DIR": str(work),
        "CHECKPOINTS": str(work / "series"),
        "AS_ROOT": "",
        "GPUCKPT": f"{sys.executable} -m gpuckpt",
    }

    def start():
        said = (work / "said").open("ab")
        with said:
            program = (sys.executable, PROGRAMS / "counter.py", work / "log")
            return jobs.start("/bin/bash", SCRIPT, *program, env=env, stdout=said, stderr=said, cwd=work)

    return start


def test_a_job_is_saved_before_its_time_is_over_and_goes_on(work, slurm, jobs):
    first = slurm()
    harness.wait_for_count(work / "log", 2)
    pid = int((work / "slurm-4711.pid").read_text())
    jobs.adopt(pid)
    _saves(first, work, 1)
    harness.wait_for(lambda: not harness.state(pid), "the job has ended")

    second = slurm()
    rounds.goes_on(work / "log", harness.numbers(work / "log")[-1])
    assert harness.alive(pid)
    _saves(second, work, 2)
    harness.wait_for(lambda: not harness.state(pid), "the job has ended again")

    third = slurm()
    rounds.goes_on(work / "log", harness.numbers(work / "log")[-1])
    assert (work / "asked").read_text() == "requeue 4711\n" * 2
    # A job that ends by itself gives its status, here 128+15, to the script.
    os.kill(pid, signal.SIGTERM)
    assert third.wait(60) == 128 + signal.SIGTERM, (work / "said").read_text()
    assert len(list((work / "series" / "slurm-4711").glob("job-*"))) == 2


def _saves(script, work: Path, times: int) -> None:
    """The signal comes, the job is saved, another turn is asked for."""
    script.send_signal(signal.SIGUSR1)
    assert script.wait(60) == 0, (work / "said").read_text()
    assert (work / "asked").read_text().count("\n") == times


def test_a_job_that_cannot_be_saved_runs_on(work, slurm, jobs):
    script = slurm()
    harness.wait_for_count(work / "log", 1)
    pid = int((work / "slurm-4711.pid").read_text())
    jobs.adopt(pid)
    (work / "series" / "slurm-4711" / "latest").mkdir()
    script.send_signal(signal.SIGUSR1)
    harness.wait_for(lambda: "could not be saved" in (work / "said").read_text(), "the script says so")
    assert harness.alive(pid)
    assert not (work / "asked").exists()
    os.kill(pid, signal.SIGTERM)
    assert script.wait(60) == 128 + signal.SIGTERM

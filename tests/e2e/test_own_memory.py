"""gpuckpt itself takes less than 300 MB, however large the tree is."""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from pathlib import Path

import pytest

from tests import harness, memory_cgroups
from tests.e2e import rounds
from tests.faults import arena
from tests.harness import start_gpuckpt

pytestmark = pytest.mark.criu

LIMIT_BYTES = 300 * 1000 * 1000
SETTLE = ("--settle", 0.2)


@pytest.fixture
def cgroup():
    """A cgroup that may have 300 MB, the page cache of what is written included; None where none can be made."""
    with memory_cgroups.limited(LIMIT_BYTES) as made:
        yield made


def peaks(run) -> dict[str, int]:
    """The most that main, owner and CRIU have had resident, in bytes."""
    most = {}
    while run.poll() is None:
        pids = {"main": run.pid, "owner": arena.owner_of(run.pid), "criu": criu_of(run.pid)}
        for name, pid in pids.items():
            with contextlib.suppress(OSError):
                said = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
                most[name] = max(most.get(name, 0), int(said.group(1)) << 10 if said else 0)
        time.sleep(0.01)
    return most


def criu_of(main: int) -> int | None:
    """As the journal has it: what CRIU has forked for a restore looks like itself at first."""
    directory = arena.run_of_main(main)
    with contextlib.suppress(OSError, AttributeError, TypeError):
        text = (directory / "journal").read_text()
        return int(re.search(r'"criu-started", "time": [0-9.]+, "pid": (\d+)', text).group(1))
    return None


def measured(jobs, *arguments, **popen) -> dict[str, int]:
    """The peaks of a run that must work."""
    run = start_gpuckpt(*arguments, *SETTLE, **popen)
    with rounds.reaping(jobs):
        most = peaks(run)
        out, _ = run.communicate()
    report = json.loads(out)
    assert report["outcome"] == "ok", report["error"]
    jobs.adopt(*report["data"]["pids"])
    print({name: f"{size >> 20} MiB" for name, size in most.items()})
    return most


def test_two_gigabytes_are_dumped_and_restored(work, jobs, cgroup):
    job = jobs.python("memory.py", "large", work / "log", 2048)
    harness.wait_for_count(work / "log", 0)
    below = {} if cgroup is None else {"preexec_fn": lambda: (cgroup / "cgroup.procs").write_text(str(os.getpid()))}
    for workers, more in ((16, ["--leave-running"]), (2, [])):
        image = work / f"img{workers}"
        dump = ("dump", "--tree", job.pid, image, "--workers", workers, *more)
        most = measured(jobs, *dump, **below)
        assert set(most) == {"main", "owner", "criu"}
        assert sum(most.values()) < LIMIT_BYTES, most
    at_dump = harness.numbers(work / "log")[-1]
    rounds.await_end(jobs, [job.pid])
    # In no cgroup of ours: the tree that comes back would be charged to it.
    most = measured(jobs, "restore", work / "img2")
    assert sum(most.values()) < LIMIT_BYTES, most
    rounds.goes_on(work / "log", at_dump, more=1)

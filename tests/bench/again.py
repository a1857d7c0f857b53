"""A second dump of a process of which nine tenths are unchanged: whole, and with the first image as its base."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

from tests import harness
from tests.bench import bench
from tests.bench.bench import Contender, Lab, Run

if TYPE_CHECKING:
    from pathlib import Path


class AgainLab(Lab):
    """tests/programs/changing.py: its heap grows by an odd number of pages, mappings come and go, a tenth is rewritten."""

    def __init__(self, kind: str, megabytes: int, where: Path, *, synced: bool) -> None:
        self.kind, self.megabytes, self.where, self.synced = kind, megabytes, where, synced
        where.mkdir(parents=True)
        self.log = where / "log"
        argv = [sys.executable, bench.ROOT / "tests/programs/changing.py", self.log, str(megabytes)]
        nothing = subprocess.DEVNULL
        self.job = subprocess.Popen(
            argv, stdin=nothing, stdout=nothing, stderr=nothing, start_new_session=True, cwd="/"
        )
        self.pids = [self.job.pid]
        harness.wait_for(lambda: self.log.exists() and self.log.stat().st_size > 0, "the memory is filled", 600)

    def change(self) -> None:
        """Let the process change itself."""
        before = self.log.read_text().count("CHANGED")
        os.kill(self.job.pid, signal.SIGUSR1)
        harness.wait_for(lambda: self.log.read_text().count("CHANGED") > before, "the memory has changed", 600)


def first(lab: AgainLab, place: Path) -> Run:
    return bench.ours("first").run(lab, place)


def second(lab: AgainLab, place: Path) -> Run:
    """With a base that was made just before the change."""
    base = lab.where / "base"
    try:
        bench.measured(["dump", "--tree", lab.job.pid, base, "--leave-running", "--settle", 0])
        lab.change()
        run = bench.ours("second, --base", "--base", str(base)).run(lab, place)
        run.stored -= run.shared
        return run
    finally:
        shutil.rmtree(base)


CONTENDERS = [Contender("first", first), Contender("second, --base", second)]

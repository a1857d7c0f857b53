"""The restore side of the bench: the same process out of CRIU's files, out of an archive, and out of our image."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests import harness
from tests.bench import bench
from tests.bench.bench import Contender, Lab, Run

UNZSTD = """
import sys, zstandard
zstandard.ZstdDecompressor().copy_stream(sys.stdin.buffer, sys.stdout.buffer)
"""


class RestoreLab(Lab):
    """The process lies in three images and has ended. Every image was just written: the page cache is warm."""

    def __init__(self, kind: str, megabytes: int, where: Path, *, synced: bool) -> None:
        super().__init__(kind, megabytes, where, synced=synced)
        self.by_hand = where / "by-hand"
        self.by_hand.mkdir()
        bench.by_hand(self, self.by_hand)
        self.plain = self.by_hand / "images"
        bench.measured(["dump", "--tree", self.job.pid, where / "image", "--settle", 0])
        self.image = where / "image"
        self.job.wait()
        self.await_gone()

    def end(self) -> None:
        """The restored tree ends, for the next contender."""
        for pid in self.pids:
            os.kill(pid, signal.SIGKILL)
        self.await_gone()

    def await_gone(self) -> None:
        harness.wait_for(lambda: not any(harness.state(pid) for pid in self.pids), "the tree leaves /proc")

    def close(self) -> None:
        for pid in self.pids:
            if harness.alive(pid):
                os.kill(pid, signal.SIGKILL)

    def criu_restore(self, images: Path, work: Path) -> float:
        argv = [self.criu, "restore", "--no-default-config", "-D", images, "-W", work, "-o", "log", "-v4", "-d"]
        argv += ["-L", self.none, "--manage-cgroups=ignore"]
        began = time.monotonic()
        subprocess.run([*map(str, argv)], check=True, stdin=subprocess.DEVNULL, timeout=600)
        return time.monotonic() - began


def plain(lab: RestoreLab, place: Path) -> Run:
    wall = lab.criu_restore(lab.plain, place)
    lab.end()
    return Run("criu restore", wall, wall)


def by_hand(lab: RestoreLab, place: Path) -> Run:
    """What a person does today: unpack, then restore."""
    images = place / "images"
    images.mkdir()
    began = time.monotonic()
    unpacker = ["zstd", "-d", "-q", "-c"] if shutil.which("zstd") else [sys.executable, "-c", UNZSTD]
    with (lab.by_hand / "image.tar.zst").open("rb") as archive:
        unpacking = subprocess.Popen(unpacker, stdin=archive, stdout=subprocess.PIPE)
        subprocess.run(["tar", "-C", images, "-x"], stdin=unpacking.stdout, check=True, timeout=600)
        unpacking.stdout.close()
        unpacking.wait()
    lab.criu_restore(images, place)
    wall = time.monotonic() - began
    lab.end()
    return Run("zstd -d | tar, criu restore", wall, wall)


def ours(name: str, *options: str) -> Contender:
    def run(lab: RestoreLab, _place: Path) -> Run:
        data, wall, peak = bench.measured(["restore", lab.image, "--settle", 0, *options])
        lab.end()
        seconds = data["seconds"]
        return Run(name, seconds["criu"] + seconds.get("inject", 0.0), wall, 0, peak, seconds)

    return Contender(name, run)


CONTENDERS = [
    Contender("criu restore", plain),
    Contender("zstd -d | tar, criu restore", by_hand),
    ours("gpuckpt"),
    ours("gpuckpt --plain", "--plain"),
]

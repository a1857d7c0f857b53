#!/usr/bin/env python3
"""gpuckpt against CRIU alone: same process, same file system, one after the other, again and again.

    python tests/bench/bench.py --megabytes 2048 --kind private --where /dev/shm/bench --rounds 7

Every contender of a round starts after an equal write to the file system, so that it does not pay for
pages that the host has to find first. Reported are minima and medians: single runs on shared machines
differ by a factor of five. Writes JSON and a picture (SVG) into --results.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from tests import harness  # noqa: E402 - the script runs from anywhere
from tests.bench import picture  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable

FILL = """
import mmap, os, signal, sys
def fill(area, share):
    noise = os.urandom(1 << 20)
    for at in range(0, len(area), 1 << 20):
        area[at : at + int((1 << 20) * share)] = noise[: int((1 << 20) * share)]
        for page in range(at, at + (1 << 20), 4096):
            area[page : page + 8] = (page + 1).to_bytes(8, "little")  # no two frames are equal
kind, size = sys.argv[1], int(sys.argv[2]) << 20
PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
if kind == "shared":
    areas = [mmap.mmap(-1, size)]
elif kind == "processes":
    children = 15
    for _ in range(children):
        if os.fork() == 0:
            break
    size = size // (children + 1) >> 20 << 20
    areas = [mmap.mmap(-1, size, flags=PRIVATE)]
else:
    areas = [mmap.mmap(-1, size, flags=PRIVATE)]
for area in areas:
    if kind == "half-zero":
        fill(memoryview(area)[: size // 2], 0.5)
        for page in range(size // 2, size, 4096):
            area[page] = 0
    else:
        fill(memoryview(area), 0.5)
open(sys.argv[3] + "." + str(os.getpid()), "w").close()
while True:
    signal.pause()
"""
KINDS = {"private": 1, "half-zero": 1, "shared": 1, "processes": 16, "changing": 1}
"""Memory that compresses by half, and how many processes it lies in."""


@dataclass
class Run:
    """One measured run. Seconds; bytes; KiB of resident memory (of the contender's own processes)."""

    contender: str
    seconds: float
    """By the clock that is compared: the time for which the job stands still, or waits to run."""
    wall: float
    stored: int = 0
    peak_kib: int = 0
    phases: dict[str, float] = field(default_factory=dict)
    shared: int = 0
    """Of `stored`, what is linked to another image's."""


@dataclass(frozen=True)
class Contender:
    """One way to do it. `run` makes (dump) or uses (restore) what lies in the given empty directory."""

    name: str
    run: Callable[[Lab, Path], Run]


class Lab:
    """The process, and what the contenders need."""

    def __init__(self, kind: str, megabytes: int, where: Path, *, synced: bool) -> None:
        self.kind, self.megabytes, self.where, self.synced = kind, megabytes, where, synced
        self.criu, why = harness.criu_or_reason()
        if self.criu is None:
            sys.exit(f"bench: {why}")
        self.none = where / "none"
        self.none.mkdir(parents=True)
        ready = where / "ready"
        argv = [sys.executable, "-c", FILL, kind, str(megabytes), str(ready)]
        nothing = subprocess.DEVNULL
        self.job = subprocess.Popen(
            argv, stdin=nothing, stdout=nothing, stderr=nothing, start_new_session=True, cwd="/"
        )
        harness.wait_for(lambda: len(list(where.glob("ready.*"))) == KINDS[kind], "the memory is filled", 600)
        self.pids = [int(path.suffix[1:]) for path in where.glob("ready.*")]

    def close(self) -> None:
        for pid in self.pids:
            os.kill(pid, signal.SIGKILL)
        self.job.wait()

    def warm(self) -> None:
        """Write as much as the largest contender will, and remove it."""
        place, piece = self.where / "warm", os.urandom(1 << 22)
        with place.open("wb") as file:
            for _ in range(self.megabytes // 4):
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())
        place.unlink()

    def criu_dump(self, images: Path) -> float:
        """Plain `criu dump`, synced where asked for; its wall time."""
        argv = [self.criu, "dump", "--no-default-config", "-D", images, "-o", "log", "-v4", "-L", self.none]
        argv += ["--manage-cgroups=ignore", "-R", "-t", self.job.pid]
        began = time.monotonic()
        subprocess.run([*map(str, argv)], check=True, stdin=subprocess.DEVNULL, timeout=600)
        self.sync(images)
        return time.monotonic() - began

    def sync(self, directory: Path) -> None:
        for path in directory.rglob("*") if self.synced else ():
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)


def measured(argv: list[object]) -> tuple[dict, float, int]:
    """Run gpuckpt; its report, wall seconds, and peak memory in KiB of all its processes."""
    began = time.monotonic()
    line = [sys.executable, "-m", "gpuckpt", *map(str, argv), "--json"]
    child = subprocess.Popen(
        line, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=ROOT
    )
    said = json.loads(child.stdout.read())
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        sys.exit(f"bench: {said['error']}")
    return said["data"], time.monotonic() - began, usage.ru_maxrss


def size_of(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


def plain(lab: Lab, place: Path) -> Run:
    wall = lab.criu_dump(place)
    return Run("criu dump", wall, wall, size_of(place))


def by_hand(lab: Lab, place: Path) -> Run:
    """What a person does today: dump, then pack it."""
    images = place / "images"
    images.mkdir()
    first = lab.criu_dump(images)
    began = time.monotonic()
    with (place / "image.tar.zst").open("wb") as out:
        tar = subprocess.Popen(["tar", "-C", images, "-c", "."], stdout=subprocess.PIPE)
        packer = ["zstd", "-1", "-T0", "-q"] if shutil.which("zstd") else [sys.executable, "-c", ZSTD]
        subprocess.run(packer, stdin=tar.stdout, stdout=out, check=True, timeout=600)
        tar.stdout.close()
        tar.wait()
    lab.sync(place)
    wall = first + time.monotonic() - began
    return Run("criu dump, tar | zstd -1", wall, wall, (place / "image.tar.zst").stat().st_size)


ZSTD = """
import sys, zstandard
zstandard.ZstdCompressor(level=1, threads=-1).copy_stream(sys.stdin.buffer, sys.stdout.buffer)
"""


def ours(name: str, *options: str) -> Contender:
    def run(lab: Lab, place: Path) -> Run:
        argv = ["dump", "--tree", lab.job.pid, place / "img", "--leave-running", "--settle", 0, *options]
        data, wall, peak = measured(argv)
        # On a disk all have to be synced; ours is, in `publish`.
        seconds = data["seconds"]["capture"] + (data["seconds"]["publish"] if lab.synced else 0)
        return Run(name, seconds, wall, data["bytes_stored"], peak, data["seconds"], data["bytes_shared"])

    return Contender(name, run)


DUMP_CONTENDERS = [
    Contender("criu dump", plain),
    Contender("criu dump, tar | zstd -1", by_hand),
    ours("gpuckpt"),
    ours("gpuckpt --level none", "--level", "none"),
    ours("gpuckpt --plain", "--plain"),
]


def encrypted_contenders() -> list[Contender]:
    """What encryption costs: the same dump without it and with it."""
    import pyrage

    recipient = str(pyrage.x25519.Identity.generate().to_public())
    return [ours("gpuckpt"), ours("gpuckpt --encrypt-to", "--encrypt-to", recipient)]


def compare(lab: Lab, contenders: list[Contender], rounds: int) -> list[Run]:
    """All contenders in turn, `rounds` times."""
    runs = []
    for number in range(rounds):
        for contender in contenders:
            lab.warm()
            place = Path(tempfile.mkdtemp(dir=lab.where))
            try:
                run = contender.run(lab, place)
            finally:
                shutil.rmtree(place)
            runs.append(run)
            print(
                f"{number + 1}/{rounds}  {run.contender:26} {run.seconds:6.2f} s  (wall {run.wall:6.2f} s)", flush=True
            )
    return runs


def summary(runs: list[Run]) -> dict[str, dict[str, float]]:
    """Minimum and median of each contender, and both against the first one's."""
    names = list(dict.fromkeys(run.contender for run in runs))
    result: dict[str, dict[str, float]] = {}
    for name in names:
        own = [run for run in runs if run.contender == name]
        seconds = [run.seconds for run in own]
        result[name] = {
            "minimum": min(seconds),
            "median": statistics.median(seconds),
            "wall_minimum": min(run.wall for run in own),
            "wall_median": statistics.median(run.wall for run in own),
            "stored": statistics.median(run.stored for run in own),
            "peak_kib": max(run.peak_kib for run in own),
        }
    first = result[names[0]]
    for one in result.values():
        one["minimum_ratio"] = one["minimum"] / first["minimum"]
        one["median_ratio"] = one["median"] / first["median"]
    return result


def drawn(found: dict[str, dict[str, float]], title: str) -> str:
    """Bars of the minima, a mark at each median, as SVG."""
    longest = max(one["median"] for one in found.values()) or 1.0
    shapes = []
    for number, (name, one) in enumerate(found.items()):
        y = 50 + number * 30
        width, median = (picture.LONGEST * one[which] / longest for which in ("minimum", "median"))
        shapes += [
            picture.name(y, name),
            picture.bar(picture.LEFT, y, width, "#2a6f97" if name.startswith("gpuckpt") else "#9a9a9a"),
            f'<rect x="{picture.LEFT + median:.1f}" y="{y - 2}" width="2" height="24" fill="#c1121f"/>',
            picture.figure(picture.LEFT + 10 + max(width, median), y, f"{one['minimum']:.2f} s"),
        ]
    return picture.frame(title, "bar: minimum; red mark: median; seconds", shapes, 60 + 30 * len(found))


@dataclass(frozen=True)
class Case:
    """One comparison: which memory, how much of it, where it is saved, which side, which contenders."""

    side: str
    kind: str
    megabytes: int
    where: Path
    synced: bool = False
    only: str = ""

    @property
    def name(self) -> str:
        disk = "synced" if self.synced else "tmpfs"
        words = (self.side, self.kind, f"{self.megabytes}MB", disk, f"{cores()}cores", self.only.replace(" ", "_"))
        return "-".join(word for word in words if word)


def cores() -> int:
    return len(os.sched_getaffinity(0))


def carry_out(case: Case, rounds: int, results: Path) -> dict[str, dict[str, float]]:
    """Measure one case; writes NAME.json and NAME.svg."""
    from tests.bench import again, restoring  # they use this module

    lab_class, known = {
        "dump": (Lab, DUMP_CONTENDERS),
        "restore": (restoring.RestoreLab, restoring.CONTENDERS),
        "again": (again.AgainLab, again.CONTENDERS),
        "encrypted": (Lab, encrypted_contenders()),
    }[case.side]
    contenders = [one for one in known if case.only in one.name]
    shutil.rmtree(case.where, ignore_errors=True)
    load = os.getloadavg()
    lab = lab_class(case.kind, case.megabytes, case.where, synced=case.synced)
    try:
        runs = compare(lab, contenders, rounds)
    finally:
        lab.close()
        shutil.rmtree(case.where, ignore_errors=True)
    found = summary(runs)
    report = {
        "what": {"side": case.side, "kind": case.kind, "megabytes": case.megabytes, "rounds": rounds},
        "host": host() | {"load_before": load, "synced": case.synced},
        "summary": found,
        "runs": [asdict(run) for run in runs],
    }
    results.mkdir(parents=True, exist_ok=True)
    (results / f"{case.name}.json").write_text(json.dumps(report, indent=1) + "\n")
    (results / f"{case.name}.svg").write_text(drawn(found, case.name))
    for contender, one in found.items():
        print(
            f"{contender:26} min {one['minimum']:6.2f} ({one['minimum_ratio']:.2f} x)  median {one['median']:6.2f}"
            f" ({one['median_ratio']:.2f} x)  stored {one['stored'] / 1e6:8.0f} MB  peak {one['peak_kib'] >> 10} MiB",
            flush=True,
        )
    return found


def host() -> dict[str, object]:
    """What the figures depend on."""
    model = next(line.partition(":")[2].strip() for line in open("/proc/cpuinfo") if line.startswith("model name"))
    return {"date": time.strftime("%Y-%m-%d"), "kernel": platform.release(), "cpu": model, "cores": cores()}


def growth(where: Path, results: Path) -> None:
    """How gpuckpt's peak memory and its time grow with the size of a process, and with the number of workers."""
    table: dict[str, list[dict[str, float]]] = {"size": [], "workers": []}
    for megabytes in (256, 1024, 4096, 8192):
        one = carry_out(Case("dump", "private", megabytes, where, only="gpuckpt"), 1, results / "growth")
        table["size"].append({"megabytes": megabytes, **one["gpuckpt"]})
    lab = Lab("private", 2048, where, synced=False)
    try:
        for workers in sorted({1, 2, 4, 8, cores()}):
            named = ours(f"gpuckpt --workers {workers}", "--workers", str(workers))
            found = summary(compare(lab, [named], 3))
            table["workers"].append({"workers": workers, **found[named.name]})
    finally:
        lab.close()
        shutil.rmtree(where, ignore_errors=True)
    shutil.rmtree(results / "growth")
    report = {"host": host(), **table}
    (results / f"growth-{cores()}cores.json").write_text(json.dumps(report, indent=1) + "\n")
    for rows in table.values():
        for row in rows:
            first = next(iter(row))
            print(f"{first} {row[first]:5.0f}: min {row['minimum']:5.2f} s, peak {row['peak_kib'] / 1024:4.0f} MiB")


SUITE = (("dump", "private"), ("restore", "private"), ("again", "changing"))
OTHER_KINDS = ("shared", "processes", "half-zero")


def suite(where: Path, megabytes: int, rounds: int, results: Path, disk: Path | None) -> None:
    """What is compared, one after the other: the main cases, other kinds of memory, a disk, and growth."""
    for side, kind in SUITE:
        carry_out(Case(side, kind, megabytes, where), rounds, results)
    for kind in OTHER_KINDS:
        for side in ("dump", "restore"):
            carry_out(Case(side, kind, megabytes, where), 3, results)
    if disk is not None:
        carry_out(Case("dump", "private", megabytes, disk, synced=True), rounds, results)
    growth(where, results)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--suite", action="store_true", help="everything, instead of one case")
    parser.add_argument("--megabytes", type=int, default=2048)
    parser.add_argument("--kind", choices=KINDS, default="private")
    parser.add_argument("--side", choices=["dump", "restore", "again", "encrypted", "migrate"], default="dump")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--where", type=Path, default=Path(f"/dev/shm/gpuckpt-bench-{os.getpid()}"))
    parser.add_argument("--disk", type=Path, help="with --suite: a directory, to be made, on a disk")
    parser.add_argument("--only", default="", help="part of a contender's name")
    parser.add_argument("--sync", action="store_true", help="sync what CRIU wrote as well (for disks)")
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results")
    chosen = parser.parse_args()
    if chosen.side == "migrate":
        from tests.bench import migrating  # two hosts in namespaces, which nobody else needs

        migrating.compare(chosen.megabytes, chosen.rounds)
        return
    if chosen.suite:
        suite(chosen.where, chosen.megabytes, chosen.rounds, chosen.results, chosen.disk)
        return
    case = Case(chosen.side, chosen.kind, chosen.megabytes, chosen.where, chosen.sync, chosen.only)
    carry_out(case, chosen.rounds, chosen.results)


if __name__ == "__main__":
    from tests.bench import bench  # as the module that restoring.py knows

    bench.main()

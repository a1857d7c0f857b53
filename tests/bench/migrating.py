"""gpuckpt migrate beside `criu dump`, `tar | zstd -1 -T0 | ssh`, `criu restore` by script: two hosts, the same process.

    make bench BENCH="--side migrate [--megabytes 1024] [--rounds 7]"

The hosts are namespaces of this machine (tests/twohosts.py) with a real sshd and link. The process holds memory that
compresses by half and rewrites a twentieth of it again and again. Compared is the downtime: from the moment it stands
still on the one host until it runs on the other. Each round does all of them, one after another.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from tests import harness
from tests.twohosts import Host, TwoHosts

FILL = """
import mmap, os, sys, time
size = int(sys.argv[1]) << 20
area = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
noise = os.urandom(1 << 20)
def fill(first, last):
    for at in range(first, last, 1 << 20):
        area[at : at + (1 << 19)] = noise[: 1 << 19]
        for page in range(at, at + (1 << 20), 4096):
            area[page : page + 8] = os.urandom(8)
fill(0, size)
open("/srv/ready", "w").close()
log = os.open("/srv/log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
for number in range(1 << 30):
    if number % 20 == 0:
        fill(0, size // 20 >> 20 << 20)
    os.write(log, b"%d\\n" % number)
    time.sleep(0.05)
"""

SCRIPT = """
set -e
mkdir /dev/shm/images
criu=$1; pid=$2; config=$3
$criu dump --tree $pid --images-dir /dev/shm/images --work-dir /dev/shm/images -v1
tar -C /dev/shm/images -c . | zstd -1 -T0 -q | ssh -F $config b 'mkdir /dev/shm/images; zstd -d -q | tar -C /dev/shm/images -x'
ssh -F $config b "install -m 600 /dev/null /srv/log; $criu restore --images-dir /dev/shm/images --work-dir /dev/shm/images -d -v1"
"""


def compare(megabytes: int, rounds: int) -> None:
    """Measure and print."""
    ways: dict[str, Callable[[TwoHosts, int], float]] = {
        "criu, tar | zstd | ssh, criu": by_script,
        "gpuckpt migrate": by_gpuckpt,
        "gpuckpt migrate --pre-seed": lambda hosts, pid: by_gpuckpt(hosts, pid, "--pre-seed"),
    }
    found: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds):
        for name, way in ways.items():
            with tempfile.TemporaryDirectory(prefix="bench-") as place:
                hosts = TwoHosts(Path(place))
                try:
                    found[name].append(measured(hosts, way, megabytes))
                finally:
                    hosts.end()
            print(f"round {number}: {name}: {found[name][-1]:.2f} s", flush=True)
    base = statistics.median(found["criu, tar | zstd | ssh, criu"])
    print(f"{megabytes} MiB, {os.cpu_count()} cores, {rounds} rounds; downtime")
    for name, seconds in found.items():
        middle = statistics.median(seconds)
        print(f"| {name} | min {min(seconds):.2f} s | median {middle:.2f} s | {middle / base:.2f} |")


def measured(hosts: TwoHosts, way: Callable[[TwoHosts, int], float], megabytes: int) -> float:
    """One migration of a fresh process; it must run there."""
    pid = hosts.a.daemon(sys.executable, "-c", FILL, megabytes)
    harness.wait_for(hosts.a.outside("/srv/ready").exists, "the memory is filled", 300)
    harness.wait_for_count(hosts.a.outside("/srv/log"), 2)
    seconds = way(hosts, pid)
    harness.wait_for(lambda: runs(hosts.b), "it runs there")
    return seconds


def runs(host: Host) -> bool:
    """The log grows there."""
    log = host.outside("/srv/log")
    return log.exists() and bool(log.read_text().strip("\0"))


def by_script(hosts: TwoHosts, pid: int) -> float:
    """As a person does it; the whole of it is downtime."""
    criu, why = harness.criu_or_reason()
    assert criu is not None, why
    begun = time.monotonic()
    hosts.a.run("sh", "-c", SCRIPT, "script", criu, pid, hosts.config, timeout=600)
    return time.monotonic() - begun


def by_gpuckpt(hosts: TwoHosts, pid: int, *options: object) -> float:
    """What the report says."""
    answer = hosts.a.gpuckpt("migrate", "--tree", pid, "b", *hosts.reach, "--settle", 0.2, *options, timeout=600)
    assert answer.status == 0, (answer.error, answer.stderr)
    print({name: round(took, 2) for name, took in answer.report["data"]["seconds"].items()})
    return float(answer.report["data"]["downtime_seconds"])

"""gpuckpt push and pull beside scp, rsync, tar | zstd | ssh and sftp: the same memory, the same sshd on loopback.

    PYTHONPATH=. .venv/bin/python tests/bench/transfer.py [--megabytes 2048] [--rounds 3] [--entropy 0.5] [--directory DIR] [--record]

The baselines send what `criu dump` writes (pages as they are), gpuckpt its packs, verified on arrival. `--entropy` is
the share of the memory that does not compress. Each round runs all of them one after another; the table shows the
median and the best, and how many times as fast as scp. Nothing but loopback and the file system of DIR is measured.

Each uses the cipher that it asks for by itself: gpuckpt AES-GCM, the others what this OpenSSH prefers (ChaCha20 up to
9.9); `scp -r, AES-GCM` shows what that makes of scp. gpuckpt syncs what has arrived before it renames it, the others
do not; on tmpfs that costs nothing. What is there from the round before is removed outside of the clock. `--record`
adds the seconds to tests/bench/results.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from gpuckpt.images.packs import PackReader, read_index
from tests.small_images import make_image
from tests.sshd import REMOTE_COMMAND, ROOT, Sshd

AES_GCM = "aes128-gcm@openssh.com"


def main() -> None:
    """Measure and print."""
    options = arguments()
    with tempfile.TemporaryDirectory(dir=options.directory) as name:
        root = Path(name)
        # Of a home with nothing in it: what this machine's user has his shell do at each start is not ours to measure.
        server = Sshd(root, f"PATH=/usr/bin:/bin HOME={root}")
        try:
            measure(options, root, server)
        finally:
            server.stop()


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--megabytes", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--entropy", type=float, default=0.5)
    parser.add_argument("--directory", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--only", default="", help="names that contain this")
    parser.add_argument("--record", action="store_true", help="write the seconds to tests/bench/results")
    return parser.parse_args()


def measure(options: argparse.Namespace, root: Path, server: Sshd) -> None:
    """All rounds, and the table."""
    image = make_image(root / "image", options.megabytes, entropy=options.entropy)
    plain = as_criu_writes_it(image, root / "plain")
    print(f"{size(plain)} MB plain, {size(image)} MB in packs, {os.cpu_count()} cores, {options.rounds} rounds")
    found: dict[str, list[float]] = {}
    for _ in range(options.rounds):
        for name, command in ways(server, image, plain, root / "there").items():
            if options.only in name:
                found.setdefault(name, []).append(timed(command, root / "there"))
    if options.record:
        record(options, found)
    slowest = statistics.median(found.get("scp -r", [1.0]))
    for name, seconds in found.items():
        median = statistics.median(seconds)
        print(f"{name:24} median {median:6.2f} s   best {min(seconds):6.2f} s   {slowest / median:5.2f} x scp -r")


def record(options: argparse.Namespace, found: dict[str, list[float]]) -> None:
    """Keep them."""
    cores = os.cpu_count()
    kind = f"noise{round(options.entropy * 100)}"
    what = {"megabytes": options.megabytes, "incompressible": options.entropy, "cores": cores, "load": os.getloadavg()}
    ssh = subprocess.run(["ssh", "-V"], check=True, capture_output=True, text=True, stdin=subprocess.DEVNULL).stderr
    place = Path(__file__).parent / "results" / f"transfer-{kind}-{options.megabytes}MB-{cores}cores.json"
    report = {"what": {**what, "ssh": ssh.split(",")[0].strip()}, "seconds": found}
    place.write_text(json.dumps(report, indent=1) + "\n")


def as_criu_writes_it(image: Path, target: Path) -> Path:
    """The same memory as plain pages files."""
    shutil.copytree(image / "criu", target)
    index = read_index(image / "packs" / "index")
    with PackReader(image / "packs", index) as reader:
        for name, frames in index.files.items():
            with (target / name).open("wb") as file:
                for frame in frames:
                    file.write(reader.read(frame))
    return target


def size(path: Path) -> int:
    """In 10^6 bytes."""
    return sum(one.stat().st_size for one in path.rglob("*") if one.is_file()) // 1_000_000


def ways(server: Sshd, image: Path, plain: Path, there: Path) -> dict[str, list[str]]:
    """Name and command of each way."""
    config = str(server.config)
    gpuckpt = [sys.executable, "-m", "gpuckpt"]
    reach = ["--ssh-config", config, "--remote-command", REMOTE_COMMAND]
    ssh = f"ssh -F {config} far"
    found = {
        "gpuckpt push": [*gpuckpt, "push", str(image), f"far:{there}", *reach],
        "gpuckpt pull": [*gpuckpt, "pull", f"far:{image}", str(there), *reach],
        "scp -r": ["scp", "-q", "-r", "-F", config, str(plain), f"far:{there}/plain"],
        "scp -r, AES-GCM": ["scp", "-q", "-r", "-c", AES_GCM, "-F", config, str(plain), f"far:{there}/plain"],
        "tar | zstd -1 | ssh": [
            "bash", "-c",
            f"tar -C {plain} -c . | zstd -1 -T0 -q | {ssh} 'mkdir {there}/x && zstd -dq | tar -C {there}/x -x'",
        ],
        "gpuckpt push, bare SFTP": [*gpuckpt, "push", str(image), f"bare:{there}", "--ssh-config", config],
        "gpuckpt push, sftp+shell": [*gpuckpt, "push", str(image), f"far:{there}", "--ssh-config", config],
        "gpuckpt push, internal-sftp": [
            *gpuckpt, "push", str(image), f"bare:{there}", "--ssh-config", config, "--remote-command", "internal-sftp",
        ],
        "sftp put -r": ["bash", "-c", f"echo put -r {plain} {there}/plain | sftp -q -b - -F {config} far"],
        "sftp put -r, the packs": ["bash", "-c", f"echo put -r {image} {there}/image | sftp -q -b - -F {config} far"],
    }  # fmt: skip
    if shutil.which("rsync"):
        found["rsync -a"] = ["rsync", "-a", "-e", f"ssh -F {config}", f"{plain}/", f"far:{there}/plain"]
    return found


def timed(command: list[str], there: Path) -> float:
    """Seconds of one run into an empty directory."""
    shutil.rmtree(there, ignore_errors=True)
    there.mkdir(mode=0o700)
    begun = time.perf_counter()
    subprocess.run(
        command, check=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=600,
    )  # fmt: skip
    return time.perf_counter() - begun


if __name__ == "__main__":
    main()

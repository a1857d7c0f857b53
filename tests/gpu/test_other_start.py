"""An image that is made on one start of a GPU host and restored on another one.

Not by one run: GPUCKPT_GPU_CARRY names a directory, which whoever runs the tests carries from the first host to the second.

    first host     -k test_save_for_another_start        leaves image.tar (in pieces where it is large) and expected.json
    second host    -k test_restore_from_another_start    the same files of system, Python and driver must be there
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests import harness
from tests.gpu.survivor import TAIL, gpuckpt
from tests.harness import Answer

pytestmark = [pytest.mark.gpu, pytest.mark.criu]

PROGRAM = Path(__file__).parent.parent / "programs" / "gpu_carried.py"
MEBIBYTES = 256
LOG = Path("/tmp/gpuckpt-carried.log")
FIRST_PID = 29_000
"""Above what a host uses soon after its start: the pid should be free on the other one."""
PIECE_BYTES = 13 << 20


@pytest.fixture
def carried():
    """The directory that goes from one host to the other."""
    name = os.environ.get("GPUCKPT_GPU_CARRY")
    if not name:
        pytest.skip("GPUCKPT_GPU_CARRY names no directory to carry an image in")
    directory = Path(name)
    directory.mkdir(parents=True, exist_ok=True)
    return directory


@pytest.fixture
def log():
    """What the program writes to, new."""
    LOG.unlink(missing_ok=True)
    yield LOG
    LOG.unlink(missing_ok=True)


def digest(pid: int) -> str:
    """What the program says of all its GPU memory."""

    def told() -> list[str]:
        return [line.split()[1] for line in LOG.read_text().splitlines() if line.startswith("XSUM ")]

    before = len(told())
    os.kill(pid, signal.SIGUSR1)
    harness.wait_for(lambda: len(told()) > before, f"a digest; {LOG} ends with {LOG.read_text()[-TAIL:]}", 30)
    return told()[-1]


def this_start() -> dict[str, object]:
    """What tells one start of a host from another."""
    host = gpuckpt("inspect").report["data"]["host"]
    return {
        "boot": Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
        "host": os.uname().nodename,
        "kernel": host["kernel"],
        "cpu": host["cpu"]["model"],
        "driver": host["gpu"]["version"],
        "gpus": [gpu["uuid"] for gpu in host["gpu"]["gpus"]],
    }


def start() -> subprocess.Popen[bytes]:
    """The program, on nothing that only this run of the tests has: no virtual environment, no open file."""
    with contextlib.suppress(OSError):
        Path("/proc/sys/kernel/ns_last_pid").write_text(str(FIRST_PID))
    child = subprocess.Popen(
        [os.path.realpath(sys.executable), str(PROGRAM), str(LOG), str(MEBIBYTES)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        cwd="/",
        env={name: value for name, value in os.environ.items() if name not in ("PATH", "PYTHONPATH")},
    )
    threading.Thread(target=child.wait, daemon=True).start()

    def counts() -> bool:
        assert harness.alive(child.pid), f"it has ended: {LOG.read_text() if LOG.exists() else 'it wrote nothing'}"
        return LOG.exists() and harness.numbers(LOG)[-1:] > [3]

    harness.wait_for(counts, f"{PROGRAM.name} counts", 60)
    return child


def test_save_for_another_start(carried, log, place, record):
    """Ended with its image, which lies in the directory in pieces that can be carried."""
    child, image = start(), place / "carried"
    told = digest(child.pid)
    answer = gpuckpt("dump", "--tree", child.pid, image, "--level", 19)
    assert (answer.status, answer.report["process"]) == (0, "ended"), answer
    harness.assert_gapless(log)
    expected = {"pid": child.pid, "digest": told, "last": harness.numbers(log)[-1], "made_on": this_start()}
    (carried / "expected.json").write_text(json.dumps(expected, indent=1))
    for old in carried.glob("image.tar*"):
        old.unlink()
    pack = 'tar -C "$1" -cf - carried | split -b "$2" -d - "$3/image.tar."'
    subprocess.run(["sh", "-ec", pack, "sh", str(place), str(PIECE_BYTES), str(carried)], check=True, timeout=60)
    data = answer.report["data"]
    record(
        "an image (CUDA without a framework, 256 MiB on the GPU) for another start of the host",
        outcome="made",
        bytes_raw=data["bytes_raw"],
        bytes_stored=data["bytes_stored"],
        pieces=[piece.stat().st_size for piece in sorted(carried.glob("image.tar.*"))],
    )


def test_restore_from_another_start(carried, log, place, record):
    """Its counter and its GPU memory go on, or a check says in words why they cannot."""
    if not (carried / "expected.json").exists():
        pytest.skip(f"no image in {carried}: test_save_for_another_start makes one, on another start")
    expected, here = json.loads((carried / "expected.json").read_text()), this_start()
    unpack = 'cat "$1"/image.tar.* | tar -C "$2" -xf -'
    subprocess.run(["sh", "-ec", unpack, "sh", str(carried), str(place)], check=True, timeout=60)
    same_gpu = expected["made_on"]["gpus"] == here["gpus"]
    gpus = [] if same_gpu else [word for n in range(len(here["gpus"])) for word in ("--gpu", f"{n}={n}")]
    answer = gpuckpt("restore", place / "carried", *gpus, "--settle", 0.5)
    refused = failed_findings(answer)
    if "pids-free" in refused:
        answer = gpuckpt("restore", place / "carried", *gpus, "--settle", 0.5, "--isolate", "pid")
        refused |= failed_findings(answer)
    if answer.status == 20:
        assert all(finding["hint"] for finding in refused.values()), refused
        outcome = f"refused: {answer.error['message']}"
    else:
        assert (answer.status, answer.report["process"]) == (0, "restored"), answer
        goes_on(answer.report["data"]["root_pid"], expected)
        outcome = "passed: counter and memory go on"
    record(
        "the image of another start of the host is restored",
        outcome=outcome,
        other_boot=expected["made_on"]["boot"] != here["boot"],
        other_gpu=not same_gpu,
        made_on=expected["made_on"],
        restored_on=here,
        findings=refused,
        seconds=answer.report["data"].get("seconds"),
    )


def goes_on(pid: int, expected: dict) -> None:
    """It counts on from where it stood, and its GPU memory is as it was; it ends then."""
    try:
        harness.wait_for(lambda: LOG.exists() and len(harness.numbers(LOG)) > 3, "it counts on", 30)
        assert digest(pid) == expected["digest"]
        assert harness.numbers(LOG)[0] == expected["last"] + 1
        harness.assert_gapless(LOG)
    finally:
        os.kill(pid, signal.SIGKILL)


def failed_findings(answer: Answer) -> dict[str, dict]:
    return {
        one["id"]: one for one in answer.report["findings"] if one["verdict"] == "fail" and one["severity"] == "block"
    }

"""push and pull take less than 300 MB on either side, however large the image is and however many connections carry it."""

from __future__ import annotations

import contextlib
import re
import time
from pathlib import Path

import pytest

from tests.faults.arena import descendants
from tests.harness import start_gpuckpt
from tests.small_images import content_of, make_image
from tests.sshd import REMOTE_COMMAND

LIMIT_BYTES = 300 * 1000 * 1000
CONNECTIONS = 4


@pytest.fixture(scope="module")
def large(tmp_path_factory) -> Path:
    return make_image(tmp_path_factory.mktemp("images") / "large", 400, packs=3)


def peak(pid: int) -> int:
    """The most that a process has had resident, in bytes."""
    with contextlib.suppress(OSError):
        said = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
        return int(said.group(1)) << 10 if said else 0
    return 0


def peaks(run, listener: int) -> tuple[int, int]:
    """The most that the processes of each side had resident, all together: a run's, and those of an sshd."""
    near: dict[int, int] = {}
    far: dict[int, int] = {}
    while run.poll() is None:
        for most, root in ((near, run.pid), (far, listener)):
            for pid in [root, *descendants(root)]:
                most[pid] = max(most.get(pid, 0), peak(pid))
        time.sleep(0.02)
    return sum(near.values()), sum(far.values())


@pytest.mark.parametrize("host", ["far", "bare"])
@pytest.mark.parametrize("verb", ["push", "pull"])
def test_bounded_on_both_sides(jobs, sshd, large, tmp_path, verb, host):
    tmp_path.chmod(0o700)
    ends = [large, f"{host}:{tmp_path}"] if verb == "push" else [f"{host}:{large}", tmp_path]
    command = ["--remote-command", REMOTE_COMMAND] if host == "far" else []
    run = start_gpuckpt(verb, *ends, "--ssh-config", sshd.config, *command, "--connections", CONNECTIONS)
    near, far = peaks(run, sshd.child.pid)
    out, err = run.communicate()
    assert run.returncode == 0, out + err
    print(f"{verb} {host}: {near >> 20} MiB here, {far >> 20} MiB there")
    assert near < LIMIT_BYTES
    assert far < LIMIT_BYTES
    assert content_of(tmp_path / "large") == content_of(large)

"""push and pull take less than 300 MB on either side, however large the image is and however many connections carry it."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.faults.arena import descendants
from tests.harness import resident, start_gpuckpt
from tests.small_images import content_of, make_image
from tests.sshd import REMOTE_COMMAND

LIMIT_BYTES = 300 * 1000 * 1000
CONNECTIONS = 4


@pytest.fixture(scope="module")
def large(tmp_path_factory) -> Path:
    return make_image(tmp_path_factory.mktemp("images") / "large", 400, packs=3)


def peaks(run, listener: int) -> tuple[int, int]:
    """The most that the processes of each side had resident together: a run's, and those of an sshd."""
    near = far = 0
    while run.poll() is None:
        near, far = (
            max(most, sum(map(resident, [root, *descendants(root)])))
            for most, root in ((near, run.pid), (far, listener))
        )
        time.sleep(0.05)
    return near, far


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

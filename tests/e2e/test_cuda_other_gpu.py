"""A job on another GPU than the one it was saved on, over the fake driver, which is as strict about the map as the real one."""

from __future__ import annotations

import pytest

from tests import harness
from tests.harness import gpuckpt

pytestmark = pytest.mark.criu

ROOM_BYTES = 8 << 30


def test_a_job_moves_to_the_other_gpu_and_back(work, fake_gpu, start_fake_cuda_app):
    fake_gpu.configure(total=ROOM_BYTES, gpus=2)
    app = start_fake_cuda_app("--mib", "16")
    app.wait_for_steps(3)
    before = app.checksum()
    for target in (1, 0):
        image = work / f"to{target}"
        dumped = gpuckpt("dump", "--tree", app.pid, image, env=fake_gpu.variables)
        assert dumped.status == 0, dumped
        harness.wait_for(lambda: not harness.state(app.pid), "its pid is free")
        maps = ("--gpu", "0=1", "--gpu", "1=0")
        moved = gpuckpt("restore", image, "--settle", 0.2, *maps, env=fake_gpu.variables)
        assert (moved.status, moved.report["process"]) == (0, "restored"), moved
        assert (fake_gpu.used_bytes(target), fake_gpu.used_bytes(1 - target)) == (16 << 20, 0)
        app.wait_for_steps(3)
        assert app.checksum() == before
    harness.assert_gapless(app.log)

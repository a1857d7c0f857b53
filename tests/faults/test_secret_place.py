"""Where what is encrypted lies in clear: in memory, and nowhere once its process is gone."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpuckpt.flows import capturing, secretplace
from gpuckpt.flows.sealing import Sealing
from gpuckpt.model.errors import MachineLacks, Refused
from gpuckpt.model.facts import CriuProgram
from gpuckpt.model.requests import DumpRequest
from gpuckpt.stores import directory, partialimage
from tests.harness import gpuckpt
from tests.sealed_images import age_key


def test_what_a_killed_process_left_is_removed_and_nothing_else(monkeypatch):
    held, dead = secretplace.make(), secretplace.make()
    (dead.path / "secret").write_text("in clear")
    directory.os.close(dead.lock_fd)
    third = secretplace.make()
    try:
        assert not dead.path.exists()
        assert held.path.exists()
        assert third.path.stat().st_mode & 0o777 == 0o700
    finally:
        for place in (held, third):
            place.remove()
    assert not held.path.exists()


def test_no_place_in_memory(monkeypatch):
    monkeypatch.setattr(secretplace, "IN_MEMORY", Path("/proc"))
    with pytest.raises(MachineLacks, match="/proc is no tmpfs"):
        secretplace.make()


def test_a_criu_that_writes_itself_gets_nothing_to_write(tmp_path):
    """Without --stream it would write the memory to the disk as it is."""
    sealing = Sealing.of((age_key(tmp_path / "identity")[1],))
    request = DumpRequest(pid=1, image=tmp_path / "image", encrypt_to=sealing.recipients)
    partial = partialimage.PartialImage(tmp_path / "image", tmp_path / "image.partial", -1)
    with pytest.raises(Refused, match="cannot be encrypted"):
        capturing.prepare(request, CriuProgram(version="3.14"), None, partial, None, [], sealing=sealing)


@pytest.mark.parametrize(
    ("options", "status", "why"),
    [
        (("--encrypt-to", "age1nonsense"), 2, "no recipient"),
        (("--encrypt-to", "/does/not/exist"), 2, "neither a recipient nor a file"),
        (("--plain", "--encrypt-to", "age1any"), 2, "exclude each other"),
        (("--sign-key", "/does/not/exist"), 21, "no such key"),
    ],
)
def test_bad_keys_are_said_before_anything_is_touched(jobs, work, options, status, why):
    job = jobs.start("/bin/sleep", "1000")
    answer = gpuckpt("dump", "--tree", job.pid, work / "image", *options)
    assert (answer.status, answer.report["process"]) == (status, "untouched"), answer.error
    assert why in answer.error["message"]
    assert not list(work.glob("image*"))

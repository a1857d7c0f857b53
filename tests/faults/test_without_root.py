"""What needs no root is done without: looking at an image, opening it, moving it. As `nobody`, with files of its own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from gpuckpt.model import manifest as manifests
from tests.faults.test_bad_input import AS_NOBODY, NOBODY
from tests.harness import Answer
from tests.sealed_images import SECRET, age_key, make_sealed

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")


@pytest.fixture
def home():
    """A directory of nobody's: an encrypted `image`, and the `identity` that opens it."""
    path = Path(tempfile.mkdtemp(prefix="gpuckpt-nobody-"))
    _, recipient = age_key(path / "identity")
    make_sealed(path / "image", recipient)
    give(path)
    yield path
    shutil.rmtree(path)


def give(path: Path) -> None:
    for one in (path, *path.rglob("*")):
        os.chown(one, NOBODY, NOBODY)


def as_nobody(home: Path, *arguments: object) -> Answer:
    argv = [sys.executable, "-c", AS_NOBODY, *map(str, arguments), "--json"]
    environment = {"PATH": os.environ["PATH"], "HOME": str(home)}
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL)
    assert done.stdout, done.stderr
    return Answer(done.returncode, json.loads(done.stdout), done.stderr)


def test_an_image_is_looked_at_and_opened(home):
    looked = as_nobody(home, "inspect", home / "image", "--verify")
    assert looked.status == 0, looked.error
    assert looked.report["data"]["encrypted"] == {"opened": False}
    assert looked.report["data"]["restorable"] is None
    opened = as_nobody(home, "inspect", home / "image", "--identity", home / "identity", "--extract", home / "out")
    assert opened.status == 0, opened.error
    assert opened.report["data"]["manifest"]["notes"] == ["a note"]
    assert (home / "out/core-42.img").read_bytes().startswith(SECRET)
    assert (home / "out/core-42.img").stat().st_uid == NOBODY
    assert "identity" not in json.dumps(opened.report["data"]["manifest"])


def test_a_pushed_image_comes_back_with_its_signature(home, sshd):
    """The other side lets nobody's key in as the user whose sshd it is."""
    (home / "image" / manifests.SIGNATURE).write_text("-----BEGIN SSH SIGNATURE-----\n")
    for name in ("id", "known_hosts", "ssh_config"):
        (home / name).write_text((sshd.directory / name).read_text().replace(str(sshd.directory), str(home)))
        (home / name).chmod(0o600)
    give(home)
    there = Path(tempfile.mkdtemp(prefix="gpuckpt-there-"))
    reach = ("--ssh-config", home / "ssh_config")
    try:
        pushed = as_nobody(home, "push", home / "image", f"bare:{there}", *reach)
        assert pushed.status == 0, pushed.error
        (home / "back").mkdir(mode=0o700)
        os.chown(home / "back", NOBODY, NOBODY)
        pulled = as_nobody(home, "pull", f"bare:{there}/image", home / "back", *reach)
        assert pulled.status == 0, pulled.error
        assert (home / "back/image" / manifests.SIGNATURE).read_text().startswith("-----BEGIN")
        assert {path.stat().st_uid for path in (home / "back/image").rglob("*")} == {NOBODY}
    finally:
        shutil.rmtree(there)

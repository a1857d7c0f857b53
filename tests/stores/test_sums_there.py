"""What a host without gpuckpt says of an image with its own programs, through a real sshd; and when it says nothing."""

from __future__ import annotations

import shutil
import time

import pytest

from gpuckpt.stores.local import DirectoryStore
from gpuckpt.stores.sftp import SftpStore
from gpuckpt.stores.sftpcheck import SLOWEST_DISK, Comparison
from gpuckpt.system.ssh import Account, Caller
from tests.small_images import make_image

STALL_SECONDS = 2.0
PROGRAMS = {
    "hangs": "exec sleep 1000",
    "talks": "while :; do echo; sleep 0.2; done",
    "refuses": "exit 1",
    "is missing": "exit 127",
}


@pytest.fixture
def compare(far_host, tmp_path):
    """compare(SHA256SUM), '' being the one there: by what an image there is compared, and which do not fit; one part is damaged."""
    far = far_host(20_000)
    there = far.b
    image = make_image(tmp_path / "image", 6)
    shutil.copytree(image, there.srv / "image")
    damaged = there.srv / "image/criu/core-42.img"
    damaged.write_bytes(bytes(damaged.stat().st_size))

    def act(program: str):
        for name, put in (("b3sum", "is missing"), ("openssl", "is missing"), ("sha256sum", program)):
            if put and (place := shutil.which(name)):
                (there.srv / name).write_text(f"#!/bin/sh\n{PROGRAMS[put]}\n")
                (there.srv / name).chmod(0o755)
                there.run("mount", "--bind", f"/srv/{name}", place)
        store = SftpStore(Caller(Account("b", config=far.config), None, STALL_SECONDS))
        offer = DirectoryStore().offer(str(image))
        parts, ticks = offer.manifest.parts, []
        begun = time.monotonic()
        try:
            bad, how = Comparison(store, b"/srv/image", parts, lambda *_: ticks.append(1)).bad_parts(offer)
        finally:
            offer.close()
            store.close()
        return [parts[index].path for index in bad], how, time.monotonic() - begun

    return act


def test_its_own_program_reads_every_byte(compare):
    bad, how, _ = compare("")
    assert (bad, how) == (["criu/core-42.img"], "SHA-256 of every byte, by sha256sum there")


def test_without_one_every_byte_is_read_back(compare):
    bad, how, _ = compare("refuses")
    assert (bad, how) == (["criu/core-42.img"], "BLAKE3 of every byte, read back over SFTP")


@pytest.mark.parametrize("program", ["hangs", "talks"])
def test_one_that_never_ends_is_waited_for_no_longer_than_its_bytes_can_take(compare, program):
    bad, how, seconds = compare(program)
    assert bad == ["criu/core-42.img"]
    assert "read back over SFTP (sha256sum there did not end within 3 s)" in how
    limit = STALL_SECONDS + (7 << 20) / SLOWEST_DISK
    assert seconds < limit + 15

"""Digests by programs of a host without gpuckpt: which commands it is sent, and what is made of its answers."""

from __future__ import annotations

import hashlib
import shutil
import subprocess

import pytest

from gpuckpt.stores.farsums import PROGRAMS, command_of, digests, is_command

ODD = ("/srv/a b", "/srv/x;reboot", "/srv/$(id)", "/srv/'\"`\\n", "/srv/-n", "/srv/\u00e9", "/srv/*")


@pytest.mark.parametrize("program", PROGRAMS)
def test_its_own_commands_are_known(program):
    for names in (ODD, *[(name,) for name in ODD]):
        assert is_command(command_of(program, names))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "b3sum",
        "b3sum --",
        "b3sum -- relative",
        "b3sum /srv/x",
        "b3sum -- /srv/x; reboot",
        "b3sum -- /srv/x\nreboot",
        "b3sum -- /srv/$(reboot)",
        "b3sum -- /srv/x > /etc/passwd",
        "b3sum -- /srv/x 'unclosed",
        "b3sum  -- /srv/x",
        "b3sum -- /srv/*",
        "b3sum -- /srv/x # no",
        "sha256sum --check /srv/x",
        "sha256sum -- -c",
        "openssl dgst -sha256 -r -out /etc/passwd /srv/x",
        "openssl dgst -sha256 -r -sign",
        "openssl rand 9",
        "rm -rf /srv/x",
        "sh -c reboot",
    ],
)
def test_nothing_else_is(text):
    assert not is_command(text)


@pytest.mark.parametrize("program", [name for name in PROGRAMS if name != "b3sum"])
def test_what_a_real_one_answers(tmp_path, program):
    if shutil.which(program) is None:
        pytest.skip(f"no {program} here")
    names = []
    for name in ("plain", "a b", "dollar$"):
        (tmp_path / name).write_bytes(name.encode())
        names.append(str(tmp_path / name))
    argv = ["/bin/sh", "-c", command_of(program, names)]
    answer = subprocess.run(argv, check=True, timeout=30, capture_output=True, stdin=subprocess.DEVNULL).stdout
    assert digests(answer, 3) == [hashlib.sha256(name.encode()).hexdigest() for name in ("plain", "a b", "dollar$")]


@pytest.mark.parametrize("answer", [b"", b"x\n", b"0" * 64 + b"\n", b"0" * 63 + b"  /x\n", (b"0" * 64 + b"  /x\n") * 2])
def test_an_answer_of_another_form(answer):
    assert digests(answer, 1) is None

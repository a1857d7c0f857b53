"""Digests by programs of a host without gpuckpt: which commands it is sent, and what is made of its answers."""

from __future__ import annotations

import hashlib
import shutil
import subprocess

import pytest

from gpuckpt.stores.farsums import PROGRAMS, RANGES, command_of, digests, is_command, program_of
from gpuckpt.stores.protocol import PIECE_BYTES

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


@pytest.mark.parametrize(
    "text", [RANGES + ";reboot", RANGES + " /etc/passwd", " " + RANGES, RANGES[:-1], RANGES.replace("dd if", "dd of")]
)
def test_the_loop_is_known_as_it_is_and_no_other(text):
    assert is_command(RANGES)
    assert not is_command(text)


def test_the_loop_says_the_digests_of_ranges(tmp_path):
    content = bytes(PIECE_BYTES) + b"a" * PIECE_BYTES + b"end"
    (tmp_path / "pack").write_bytes(content)
    asked = [(0, 1), (1, 2), (2, 1), (0, 16), (3, 1)]
    lines = "".join(f"{at} {count} {tmp_path}/pack\n" for at, count in asked)
    answer = subprocess.run(["sh", "-c", RANGES], input=lines.encode(), capture_output=True, check=True, timeout=60)
    first, *rest = answer.stdout.splitlines()
    program = next(one for one in PROGRAMS if shutil.which(one))
    assert program_of(first) == program
    if program in ("openssl", "sha256sum"):
        ranges = [content[at * PIECE_BYTES : (at + count) * PIECE_BYTES] for at, count in asked]
        assert digests(b"\n".join(rest), len(asked)) == [hashlib.sha256(one).hexdigest() for one in ranges]


def test_the_loop_where_no_program_can_be_run(tmp_path):
    shell = shutil.which("sh")
    answer = subprocess.run(
        [shell, "-c", RANGES], input=b"", capture_output=True, timeout=60, env={"PATH": str(tmp_path)}
    )
    assert program_of(answer.stdout.partition(b"\n")[0]) == ""


@pytest.mark.parametrize("line", [b"", b"rm", b"b3sum -", b"\xff", b"Welcome to host", b"x" * 5000])
def test_a_program_that_is_none(line):
    assert program_of(line) == ""

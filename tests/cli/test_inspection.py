"""The screens of inspect: every fact is there, at every width, whatever the facts are."""

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from cli_samples import dump_report, host, host_report, image_report, manifest, process_report, tree

from gpuckpt.cli.manner import Manner
from gpuckpt.cli.render import present
from gpuckpt.model.facts import Stdio, Surroundings
from gpuckpt.model.jsonform import to_json

ROOT = Path(__file__).parents[2]


def screen(report, capsys, **manner):
    assert present(report, Manner(**manner)) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out


def test_image(capsys):
    out = screen(image_report(), capsys)
    for fact in (
        "/var/lib/gpuckpt/llm-2026-11-30", "0f6f2a7c9e514f60", "cannot be restored here now: 1 check", "2026-11-18 11:06:40 UTC",
        "gpu07", "CRIU 4.3", "20.0 GiB stored", "--verify reads every byte", "generation 2, restored from image 9d1ca1ab77e04c22",
        "vllm 0.31.0 with meta-llama/Llama-3.1-8B-Instruct", "Slurm job 4711", "llm.service (Restart=on-failure)",
        "4 processes, 72 threads", "VLLM::EngineCore", "NVIDIA H200", "18.0 GiB by 4243", "GPU-5f3c8a51-2d0e-4f0b-9a77-0e0d6a4f9f10",
        "/srv/llm/log/server.log", "write deleted", "10.0.0.1:41022 -> 10.0.0.9:6379", "leaves the tree", "812 logger",
        "restore needs --stdout FILE", "captured files", "frozen 15.9 s", "gpu_to_host", "2.9 GiB/s", "REFUSES", "tcp-outside",
        "persistence-mode",
    ):  # fmt: skip
        assert fact in out, fact


@pytest.mark.parametrize(("data", "words"), [
    ({"restorable": "yes"}, "can be restored here"),
    ({"restorable": "unknown"}, "not known whether"),
    ({"verified": False}, "damaged"),
    ({"verified": True}, "every byte, just now"),
])  # fmt: skip
def test_image_verdicts(capsys, data, words):
    assert words in screen(image_report(**data), capsys)


def test_process(capsys):
    out = screen(process_report(), capsys)
    for fact in (
        "4242 python3",
        "cannot be dumped as it is: 2 checks",
        "about 39.0 GiB",
        "├─",
        "10 mapped only",
        "1 of 5 pass, 2 refuse",
    ):
        assert fact in out
    assert "libcuda.so" not in out
    assert "can be dumped now" in screen(process_report(dumpable="yes"), capsys)


def test_a_tree_left_held_says_how_to_repair_it(capsys):
    held = {"operation": "dump", "since": 0.5}
    assert "by an interrupted dump, since 1970-01-01 00:00:00 UTC: gpuckpt restore --tree 4242" in screen(
        process_report(interrupted=held), capsys
    )
    assert "held" not in screen(process_report(interrupted=None), capsys).lower().split("processes")[0]


def test_verbose_shows_all(capsys):
    out = screen(process_report(), capsys, verbose=True)
    assert "libcuda.so" in out
    assert "running as root" in out


def test_long_lists_are_cut(capsys):
    many = replace(
        tree(), processes=tuple(replace(tree().processes[3], id=replace(tree().root, pid=5000 + n)) for n in range(40))
    )
    assert "and 30 more; --verbose shows all" in screen(process_report(tree=to_json(many)), capsys)
    assert "5039" in screen(process_report(tree=to_json(many)), capsys, verbose=True)


def test_host(capsys):
    out = screen(host_report(), capsys)
    for fact in (
        "gpu07",
        "can dump and restore, with GPU state",
        "CRIU 4.3 at /opt/gpuckpt/criu/bin/criu",
        "580.159.04",
        "Xid 79",
        "persistence mode off",
    ):
        assert fact in out
    out = screen(host_report(able=False), capsys)
    for fact in ("can neither dump nor restore", "apt install criu", "lacks CAP_SYS_ADMIN", "no NVIDIA driver"):
        assert fact in out


def test_empty_tree_and_odd_kinds(capsys):
    bare = replace(
        tree(),
        processes=(),
        files=(),
        sockets=(),
        pipes=(),
        outside_stdio=(),
        cuda=(),
        gpu_uses=(),
        engines=(),
        surroundings=Surroundings(),
    )
    screen(process_report(tree=to_json(bare)), capsys)
    screen(image_report(manifest=to_json(replace(manifest(), tree=bare, parts=(), seconds={}, created=-5e300))), capsys)
    assert screen(replace(host_report(), data={"kind": "something else"}), capsys) == ""


def test_processes_that_are_their_own_ancestors_do_not_hang(capsys):
    """A manifest from elsewhere can claim anything."""
    circle = replace(tree(), processes=tuple(replace(p, ppid=4251) for p in tree().processes))
    screen(process_report(tree=to_json(circle)), capsys)


def test_foreign_bytes_are_shown_escaped(capsys):
    odd = os.fsdecode(b"/srv/\xff\x1b[2J\n") + "[bold]x[/bold]"
    sample = tree()
    sample = replace(
        sample,
        processes=(replace(sample.processes[0], comm=odd, argv=(odd,)), *sample.processes[1:]),
        files=(replace(sample.files[0], path=odd),),
        sockets=(replace(sample.sockets[1], local=odd, peer=odd),),
    )
    found = replace(host(), hostname=odd, os=odd)
    for report in (
        process_report(tree=to_json(sample)),
        image_report(
            path=odd, manifest=to_json(replace(manifest(), tree=sample, host=found, notes=(odd,), image_id=odd))
        ),
        replace(host_report(), data=host_report().data | {"host": to_json(found)}),
    ):
        out = screen(report, capsys)
        assert r"\xff\x1b[2J\n[bold]x[/bold]" in out.replace("\n", "").replace(" ", "") or r"\xff" in out
        assert "\x1b" not in out
        out.encode("utf-8")


def on_terminal(what, columns, **environment):
    """What a program writes to a terminal of so many columns."""
    code = f"""
import sys; sys.path.insert(0, {str(ROOT / "tests" / "cli")!r})
import cli_samples as samples
from gpuckpt.cli.render import present
from gpuckpt.cli.manner import Manner
present(samples.{what}(), Manner())
"""
    program = f"""
import os, pty, sys
pid, fd = pty.fork()
if pid == 0:
    os.execve({sys.executable!r}, [{sys.executable!r}, "-c", {code!r}], {environment | {"COLUMNS": str(columns), "PYTHONPATH": str(ROOT)}!r})
while True:
    try:
        piece = os.read(fd, 65536)
    except OSError:
        break
    if not piece:
        break
    sys.stdout.buffer.write(piece)
os.waitpid(pid, 0)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=60, check=True)
    return done.stdout.replace(b"\r\n", b"\n").decode()


def plain(text):
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


@pytest.mark.parametrize("what", ["image_report", "process_report", "host_report"])
@pytest.mark.parametrize("columns", [80, 160])
def test_screens_fit_the_terminal(what, columns):
    out = on_terminal(what, columns, TERM="xterm-256color", LANG="C.UTF-8")
    assert "\x1b[" in out
    assert max(len(line) for line in plain(out).splitlines()) <= columns


def test_a_narrow_terminal_is_no_failure():
    assert "Traceback" not in on_terminal("image_report", 10, TERM="xterm", LANG="C.UTF-8")


def test_no_color():
    out = on_terminal("process_report", 80, TERM="xterm-256color", LANG="C.UTF-8", NO_COLOR="1")
    assert not re.search(r"\x1b\[[0-9;]*3[0-7]", out)


@pytest.mark.parametrize("locale", [{"LC_ALL": "C"}, {"LANG": "C"}, {}])
def test_a_c_locale_gets_ascii(locale):
    out = on_terminal("process_report", 80, TERM="xterm", **locale)
    assert out.isascii()
    assert "`- " in out


def test_a_dumb_terminal_gets_no_escapes():
    assert "\x1b" not in on_terminal("process_report", 80, TERM="dumb", LANG="C.UTF-8")


def test_dump_report_is_no_inspection(capsys):
    assert screen(dump_report(findings=()), capsys) == ""


def test_a_terminal_is_never_to_be_replaced_by_a_file(capsys):
    streams = tuple(Stdio(fd, "tty", "tty[8800:1]", (f"4242 fd {fd}",), fd > 0, "812 sshd") for fd in (0, 1))
    drawn = to_json(replace(tree(), outside_stdio=streams))
    out = screen(process_report(tree=drawn), capsys)
    assert "leaves the tree: restore needs --wait" in out
    assert "FILE" not in out

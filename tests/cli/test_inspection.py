"""The screens of inspect: every fact is there, at every width, whatever the facts are."""

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from cli_samples import dump_report, host, host_report, image_report, manifest, process_report, tree

from gpuckpt.cli.manner import SECTIONS, Manner
from gpuckpt.cli.render import present
from gpuckpt.model.facts import Stdio, Surroundings
from gpuckpt.model.inspection import (
    Block,
    Comparison,
    Difference,
    MemoryChange,
    MemoryKind,
    MemoryPicture,
    ProcessMemory,
)
from gpuckpt.model.jsonform import to_json

ROOT = Path(__file__).parents[2]
MIB = 1 << 20


def screen(report, capsys, **manner):
    assert present(report, Manner(**manner)) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out


FIRST_SCREEN = (
    "/var/lib/gpuckpt/llm-2026-11-30", "0f6f2a7c9e514f60", "cannot be restored here now: 1 check", "2026-11-18 11:06:40 UTC",
    "on gpu07", "20.0 GiB stored", "--verify reads every byte", "generation 2, restored from image 9d1ca1ab77e04c22",
    "vllm 0.31.0 with meta-llama/Llama-3.1-8B-Instruct", "Slurm job 4711", "llm.service (Restart=on-failure)",
    "4 processes, 72 threads", "VLLM::EngineCore", "GPU 0", "NVIDIA H200: 18.0 GiB by 4243", "14 open or mapped, 2 written, 1 deleted, 1 saved in the image",
    "3, 1 leaves the tree: kept (--tcp keep)", "restore needs --stdout FILE", "frozen 15.9 s", "ended with it", "REFUSES",
    "tcp-outside", "persistence-mode",
)  # fmt: skip
LISTS = {
    "files": ("/srv/llm/log/server.log", "write deleted", "libcuda.so", "link-remap"),
    "sockets": ("10.0.0.1:41022 -> 10.0.0.9:6379", "812 logger", "restore needs --stdout FILE"),
    "memory": ("captured files", "process state", "SHARE"),
    "gpus": ("GPU-5f3c8a51-2d0e-4f0b-9a77-0e0d6a4f9f10", "580.159.04", "4247"),
    "environment": (
        "CRIU",
        "4.3",
        "glibc 2.41",
        "HOME PATH",
        "/srv/llm",
        "model-00001-of-00004.safetensors",
        "nftables",
    ),
    "timings": ("gpu_to_host", "2.9 GiB/s", "of that stopped 9.70 s"),
}


def test_an_image_has_a_calm_first_screen_and_names_the_rest(capsys):
    out = screen(image_report(), capsys)
    for fact in FIRST_SCREEN:
        assert fact in out, fact
    assert out.rstrip().endswith("More: --files --sockets --memory --gpus --environment --timings, or --all")
    assert "libcuda.so" not in out


@pytest.mark.parametrize("section", SECTIONS)
def test_a_list_that_is_asked_for_stands_alone(capsys, section):
    out = screen(image_report(), capsys, sections=(section,))
    for fact in LISTS[section]:
        assert fact in out, fact
    assert "llm-2026-11-30" in out
    assert "persistence-mode" not in out
    assert "VLLM::EngineCore" not in out


def test_all_shows_all_there_is(capsys):
    out = screen(image_report(memory=to_json(PICTURE)), capsys, everything=True)
    for fact in (
        *FIRST_SCREEN,
        *(fact for facts in LISTS.values() for fact in facts),
        "running as root",
        "2.0x smaller",
    ):
        assert fact in out, fact
    assert "More:" not in out


PICTURE = MemoryPicture(
    MIB,
    (
        MemoryKind("heap", 4 * MIB, MIB, 2 * MIB, (Block(MIB, MIB), Block(MIB, MIB // 2), Block(MIB, MIB // 2), Block(MIB, 0))),
        MemoryKind("GPU copy", 300 * MIB, 0, 150 * MIB, (Block(MIB, MIB // 8),) * 300),
    ),
    (ProcessMemory(4243, 300 * MIB, 150 * MIB),),
)  # fmt: skip


def test_the_picture_of_memory(capsys):
    out = screen(image_report(memory=to_json(PICTURE)), capsys, sections=("memory",))
    assert "304 MiB held, 152 MiB stored, 2.0x smaller" in out
    assert "a block is 1.0 MiB" in out
    assert re.search(r"heap +█▓▓·$", out, re.MULTILINE)
    assert out.count("▒") == 300 + 1
    drawn = on_terminal(
        "image_report", 60, how="sections=('memory',)", data=f"memory={to_json(PICTURE)!r}", TERM="xterm", LC_ALL="C"
    )
    assert drawn.isascii()
    assert re.search(r"heap +#==0$", plain(drawn), re.MULTILINE)
    assert max(map(len, plain(drawn).splitlines())) <= 60


def compared(*differences, memory=()):
    return to_json(Comparison("/srv/older", "9d1c", 1_795_000_000.0 - 3600, differences, memory))


def test_how_two_images_differ(capsys):
    differences = (
        Difference("versions", "CRIU", "4.2.1", "4.3"),
        Difference("processes", "4251 tee", "", "900 KiB resident"),
        Difference("files", "/srv/" + "long/" * 30 + "log", "4 KiB", "8 KiB"),
        Difference("files", "/srv/gone", "4 KiB", ""),
    )
    memory = (MemoryChange("heap", 8 * MIB, 4 * MIB, 2 * MIB), MemoryChange("shared", 0, MIB, 0))
    out = screen(image_report(diff=compared(*differences, memory=memory)), capsys)
    for fact in (
        "made 1 h 0 min after /srv/older",
        "2.0 MiB of 8.0 MiB is not in the other image: 25%", "4.2.1 -> 4.3", "new", "4251 tee", "gone", "/srv/gone", "4 KiB -> 8 KiB",
    ):  # fmt: skip
        assert fact in out, fact
    assert "More:" not in out
    assert "alike" in screen(image_report(diff=compared()), capsys)
    plain_image = (MemoryChange("heap", MIB, MIB, None),)
    assert "--plain" in screen(image_report(diff=compared(memory=plain_image)), capsys)


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
        "3, 1 leaves the tree",
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


def test_verbose_shows_every_check(capsys):
    assert "running as root" in screen(process_report(), capsys, verbose=True)
    assert "running as root" not in screen(process_report(), capsys)


def test_lists_of_a_process_and_a_host(capsys):
    out = screen(process_report(), capsys, sections=("files", "sockets", "gpus", "environment"))
    for fact in ("libcuda.so", "10.0.0.9:6379", "580.159.04", "HOME PATH"):
        assert fact in out
    assert "libcuda.so" in screen(process_report(), capsys, everything=True)
    out = screen(host_report(), capsys, sections=("gpus",))
    assert "Xid 79" in out
    assert "CRIU" not in out
    assert "kernel 6.12.48" in screen(host_report(), capsys, sections=("environment",))


def test_what_another_host_says_names_it(capsys):
    assert "cannot be restored on far: now: 1 check" in screen(image_report(against="far:"), capsys)


def test_long_lists_are_cut(capsys):
    many = replace(
        tree(), processes=tuple(replace(tree().processes[3], id=replace(tree().root, pid=5000 + n)) for n in range(40))
    )
    assert "and 30 more; --all shows all" in screen(process_report(tree=to_json(many)), capsys)
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


def on_terminal(what, columns, how="", data="", **environment):
    """What a program writes to a terminal of so many columns."""
    code = f"""
import sys; sys.path.insert(0, {str(ROOT / "tests" / "cli")!r})
import cli_samples as samples
from gpuckpt.cli.render import present
from gpuckpt.cli.manner import SECTIONS, Manner
present(samples.{what}({data}), Manner({how}))
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
    out = on_terminal(what, columns, how="everything=True", TERM="xterm-256color", LANG="C.UTF-8")
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

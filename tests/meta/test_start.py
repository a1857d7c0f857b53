"""Starting is fast because what is heavy is loaded where it is used."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HEAVY = (
    "paramiko",
    "rich",
    "rich.progress",
    "pynvml",
    "zstandard",
    "blake3",
    "cryptography",
    "pyrage",
    "pydantic",
    "gpuckpt.flows",
    "gpuckpt.checks",
    "subprocess",
)


def loaded_after(code):
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; {code}; print(*sorted(sys.modules))"],
        capture_output=True, text=True, timeout=60, check=True, cwd=ROOT,
    )  # fmt: skip
    return set(done.stdout.split())


def test_the_command_line_loads_nothing_heavy():
    # typer itself loads subprocess (for its own completion installer); the rest is ours to keep out.
    before = loaded_after("import typer, typer.completion")
    added = loaded_after("import gpuckpt.cli.app") - before
    assert "gpuckpt.cli.app" in added
    assert not added & set(HEAVY)


@pytest.mark.parametrize("argv", [["--help"], ["dump", "--help"], ["--version"]])
def test_help_loads_nothing_heavy(argv):
    code = f"""
import sys, io
sys.argv = ["gpuckpt", *{argv!r}]
from gpuckpt.cli.app import main
try:
    main()
except SystemExit:
    pass
sys.stderr.write(" ".join(sys.modules))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True, cwd=ROOT
    )
    assert not set(done.stderr.split()) & (set(HEAVY) - {"subprocess"})

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

AT_TAB = ("gpuckpt.cli.render", "gpuckpt.model.requests", "gpuckpt.model.report", "gpuckpt.model.facts", "json")
"""What TAB has no use for."""


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


@pytest.mark.parametrize("flow", ["dump", "restore", "migrate"])
def test_a_flow_loads_what_few_ask_for_when_they_do(flow):
    """--ready-http, encryption, the age format: each costs as much as the rest of a flow."""
    loaded = loaded_after(f"import gpuckpt.flows.{flow}")
    assert f"gpuckpt.flows.{flow}" in loaded
    assert not loaded & {"http.client", "ssl", "cryptography", "pyrage", "uuid", "paramiko"}


@pytest.mark.parametrize(
    "words", ["gpuckpt ", "gpuckpt dump --", "gpuckpt dump --tree ", "gpuckpt push img ", "gpuckpt inspect "]
)
@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_tab_loads_nothing_heavy(shell, words):
    """What Typer loads of its own at TAB is its affair; rich is ours to keep out (cli/app.py)."""
    environment = {"PATH": "/usr/bin:/bin", "HOME": "/", "_GPUCKPT_COMPLETE": f"complete_{shell}"}
    if shell == "bash":
        environment |= {"COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    else:
        environment |= {"_TYPER_COMPLETE_ARGS": words, "_TYPER_COMPLETE_FISH_ACTION": "get-args"}
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "gpuckpt"],
        env=environment, capture_output=True, text=True, timeout=60, check=False, cwd=ROOT,
    )  # fmt: skip
    loaded = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "gpuckpt.cli.completing" in loaded
    assert not loaded & {*HEAVY, *AT_TAB} - {"subprocess"}
    assert not any(name.startswith(("rich.", "gpuckpt.flows.", "gpuckpt.system.procfs")) for name in loaded)

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

SELDOM = ("secrets", "random", "logging", "concurrent.futures", "tempfile")
"""Of the standard library: tens of milliseconds for what few runs do."""

VERBS = {f"gpuckpt.cli.{verb}" for verb in ("dump", "inspect", "restore", "push", "pull", "migrate", "serve")}

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


def loaded_by(argv):
    """What the command line has loaded when it ends."""
    code = f"""
import sys
sys.argv = ["gpuckpt", *{argv!r}]
from gpuckpt.cli.app import main
try:
    main()
except SystemExit:
    pass
sys.stderr.write(chr(10) + " ".join(sys.modules))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True, cwd=ROOT
    )
    return set(done.stderr.rpartition("\n")[2].split())


@pytest.mark.parametrize("argv", [["--help"], ["dump", "--help"], ["--version"]])
def test_help_loads_nothing_heavy(argv):
    loaded = loaded_by(argv)
    assert not loaded & (set(HEAVY) - {"subprocess"})
    assert loaded & VERBS == {f"gpuckpt.cli.{word}" for word in argv[:1] if not word.startswith("-")}


def test_a_run_loads_its_own_verb_and_flow(tmp_path):
    """Each verb costs its options, in Typer too; each flow its world."""
    loaded = loaded_by(["dump", "--dry-run", "--tree", "4194303", str(tmp_path)])
    assert "gpuckpt.flows.dump" in loaded
    assert loaded & VERBS == {"gpuckpt.cli.dump"}
    others = {f"gpuckpt.flows.{name}" for name in ("describe", "migrate", "restore", "series", "readiness", "extract")}
    assert not loaded & {*others, *SELDOM, "http.client", "cryptography", "rich"}


def test_the_owner_loads_what_an_owner_needs():
    loaded = loaded_after("import gpuckpt.owner.process")
    assert "gpuckpt.owner.dumping" in loaded
    assert not loaded & {*SELDOM, *HEAVY, "http"} - {"subprocess", "blake3"}
    assert not any(name.startswith(("typer", "gpuckpt.images", "gpuckpt.stores")) for name in loaded)


def test_data_classes_are_the_cheap_ones():
    """model/records.py says why."""
    for path in (ROOT / "gpuckpt").rglob("*.py"):
        text = path.read_text()
        if "@dataclass(frozen=True, slots=True)\n" in text:
            assert "from gpuckpt.model.records import dataclass\n" in text, path


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

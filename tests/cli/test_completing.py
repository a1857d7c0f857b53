"""TAB: pids with names, image directories, and the scripts in real shells."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from gpuckpt.cli.completing import complete_image, complete_pid

ROOT = Path(__file__).parents[2]


def test_pids_have_names():
    child = subprocess.Popen(["sleep", "30"])
    try:
        assert (str(child.pid), "sleep") in complete_pid(str(child.pid))
    finally:
        child.kill()
        child.wait()
    assert all(pid not in ("1", str(os.getpid())) for pid, _ in complete_pid(""))
    assert complete_pid("x") == []


def test_images_and_directories(tmp_path, monkeypatch):
    (tmp_path / "img").mkdir()
    (tmp_path / "img" / "manifest.json").touch()
    (tmp_path / "inner").mkdir()
    (tmp_path / "ignored").touch()
    monkeypatch.chdir(tmp_path)
    assert complete_image("i") == ["img", "inner/"]
    assert complete_image(f"{tmp_path}/im") == [f"{tmp_path}/img"]
    assert complete_image("nowhere/") == []


def completed(shell, words):
    """What the program answers for a completion request, as its script asks."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "_GPUCKPT_COMPLETE": f"complete_{shell}", **words}
    done = subprocess.run(
        [sys.executable, "-m", "gpuckpt"], env=env, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stderr == ""
    return done.stdout


def test_the_program_answers_bash():
    assert completed("bash", {"COMP_WORDS": "gpuckpt d", "COMP_CWORD": "1"}).split() == ["dump"]
    assert "--leave-running" in completed("bash", {"COMP_WORDS": "gpuckpt dump --le", "COMP_CWORD": "2"})


def gpuckpt_in(directory):
    """A `gpuckpt` on PATH that is this source."""
    script = directory / "gpuckpt"
    script.write_text(f'#!/bin/sh\nPYTHONPATH="{ROOT}" exec "{sys.executable}" -m gpuckpt "$@"\n')
    script.chmod(0o755)
    return {**os.environ, "PATH": f"{directory}:{os.environ['PATH']}"}


@pytest.mark.parametrize(
    ("program", "script"),
    [
        ("bash", "source {root}/completions/gpuckpt.bash; COMP_WORDS=(gpuckpt re); COMP_CWORD=1; _gpuckpt_completion gpuckpt; echo ${{COMPREPLY[@]}}"),
        ("zsh", "autoload -Uz compinit && compinit -D && source {root}/completions/_gpuckpt && whence -w _gpuckpt_completion && echo restore"),
        ("fish", "source {root}/completions/gpuckpt.fish; complete -C 'gpuckpt re'"),
    ],
)  # fmt: skip
def test_scripts_load_and_complete(program, script, tmp_path):
    if shutil.which(program) is None:
        pytest.skip(f"{program} is not installed here")
    env = gpuckpt_in(tmp_path)
    done = subprocess.run(
        [program, "-c", script.format(root=ROOT)], env=env, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "restore" in done.stdout

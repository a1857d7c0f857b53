"""TAB: pids with names, image directories, and the scripts in real shells."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from gpuckpt.cli.completing import complete_host, complete_image, complete_pid, complete_target
from gpuckpt.cli.sshnames import ssh_hosts

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


@pytest.fixture
def ssh_files(tmp_path, monkeypatch):
    """A home and an /etc/ssh with every form that a host has there."""
    home, system = tmp_path / "home", tmp_path / "etc"
    (home / ".ssh" / "conf.d").mkdir(parents=True)
    system.mkdir()
    (home / ".ssh" / "config").write_text(
        "Include conf.d/* ~/more\nHost far *.wild !not far2 a?b\n  HostName 10.0.0.9\n"
        'host="quoted"\n\tHOST = tabbed\nMatch host matched\nIncludes gone\n# Host comment\n'
    )
    (home / ".ssh" / "conf.d" / "a").write_text("Host included\nInclude conf.d/a\n")
    (home / "more").write_text("Host athome\n")
    (home / ".ssh" / "known_hosts").write_text(
        "|1|aGFzaGVk= ssh-ed25519 AAAA\nknown,10.0.0.7 ssh-ed25519 AAAA\n[ported]:2222 ssh-ed25519 AAAA\n"
        "@revoked bad ssh-rsa AAAA\n@cert-authority *.org ssh-rsa AAAA\n# comment\n\n2001:db8::1 ssh-rsa AAAA\n"
    )
    (system / "ssh_config").write_text("Host everywhere\nInclude sub\n")
    (system / "sub").write_text("Host below\n")
    os.mkfifo(system / "ssh_known_hosts")
    monkeypatch.setenv("HOME", str(home))
    return home, system


def test_hosts_that_ssh_knows(ssh_files):
    names = ["10.0.0.7", "athome", "below", "everywhere", "far", "far2", "included", "known", "quoted", "tabbed"]
    assert ssh_hosts(*ssh_files) == names
    assert ssh_hosts(Path("/nowhere"), Path("/nowhere")) == []


def test_hosts_are_gone_on_with_and_never_asked(ssh_files, tmp_path, monkeypatch):
    assert complete_host("fa") == ["far:", "far2:"]
    assert complete_host("admin@kn") == ["admin@known:"]
    assert complete_host("far:") == complete_host("far:/srv/") == complete_host("./fa") == []
    (tmp_path / "family").mkdir()
    monkeypatch.chdir(tmp_path)
    assert complete_target("fa") == ["family/", "far:", "far2:"]
    assert not [one for one in complete_target("") if one.endswith(":")]


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


def test_isolations_are_offered():
    assert completed("bash", {"COMP_WORDS": "gpuckpt restore --isolate ", "COMP_CWORD": "3"}).split() == [
        "pid", "net", "pid,net",
    ]  # fmt: skip
    assert completed("bash", {"COMP_WORDS": "gpuckpt restore --isolate pid,", "COMP_CWORD": "3"}).split() == ["pid,net"]


def gpuckpt_in(directory):
    """A `gpuckpt` on PATH that is this source."""
    script = directory / "gpuckpt"
    script.write_text(f'#!/bin/sh\nPYTHONPATH="{ROOT}" exec "{sys.executable}" -m gpuckpt "$@"\n')
    script.chmod(0o755)
    return {**os.environ, "PATH": f"{directory}:{os.environ['PATH']}"}


@pytest.mark.parametrize(
    ("program", "script"),
    [
        ("bash", "source {root}/completions/gpuckpt.bash; COMP_LINE='gpuckpt re' COMP_POINT=10; _gpuckpt_completion gpuckpt; echo ${{COMPREPLY[@]}}"),
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


@pytest.mark.parametrize(("line", "answers"), [
    ("gpuckpt push img fa", ["far:", "far2:"]),
    ("gpuckpt push img admin@fa", ["far:", "far2:"]),
    ("gpuckpt push img far:", []),
    ("gpuckpt inspect i", ["img", "inner/", "included:"]),
    ("gpuckpt inspect img --diff im", ["img"]),
    ("gpuckpt inspect img --against admin@k", ["known:"]),
])  # fmt: skip
def test_bash_completes_one_word_of_host_and_user(line, answers, tmp_path, ssh_files):
    """bash breaks words at @ and : and puts the answer in the place of the last of them."""
    (tmp_path / "img").mkdir()
    (tmp_path / "img" / "manifest.json").touch()
    (tmp_path / "inner").mkdir()
    script = f"source {ROOT}/completions/gpuckpt.bash; COMP_LINE='{line}' COMP_POINT={len(line)}; _gpuckpt_completion gpuckpt"
    done = subprocess.run(
        ["bash", "-c", f'{script}; printf "%s\\n" "${{COMPREPLY[@]}}"'],
        env=gpuckpt_in(tmp_path), cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.stderr == ""
    assert done.stdout.split() == answers


def replies(line, key, directory):
    """What bash gets to show or to put into the line: `key` is its COMP_TYPE, 9 for the first TAB and 63 for the list."""
    script = (
        f"source {ROOT}/completions/gpuckpt.bash; COMP_TYPE={key} COLUMNS=60 COMP_LINE='{line}' COMP_POINT={len(line)}"
    )
    done = subprocess.run(
        ["bash", "-c", f'{script}; _gpuckpt_completion gpuckpt; printf "%s\\n" "${{COMPREPLY[@]}}"'],
        env=gpuckpt_in(directory), capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    return done.stdout.splitlines()


def test_bash_lists_with_descriptions_and_completes_without(tmp_path):
    with subprocess.Popen(["sleep", "60"]) as first, subprocess.Popen(["sleep", "60"]) as second:
        try:
            listed = [line.split() for line in replies("gpuckpt dump --tree ", 63, tmp_path)]
            assert [[str(one.pid), "(sleep)"] in listed for one in (first, second)] == [True, True]
            put = replies("gpuckpt dump --tree ", 9, tmp_path)
            assert {str(first.pid), str(second.pid)} <= set(put)
            assert replies(f"gpuckpt dump --tree {first.pid}", 63, tmp_path)[0].split()[0] == str(first.pid)
        finally:
            first.kill()
            second.kill()
    verbs = replies("gpuckpt ", 63, tmp_path)
    assert verbs[0] == "dump     (Save a process tree as an image.)"
    assert all(len(line) <= 60 for line in verbs)
    assert "--leave-running" in replies("gpuckpt dump --", 63, tmp_path)

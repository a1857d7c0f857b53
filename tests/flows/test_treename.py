"""Which process a pid file or a unit means, and the words where that cannot be said.

systemd is not here: a program of the name systemctl on PATH answers in its place, in the words of systemd 252.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from gpuckpt.flows import treename
from gpuckpt.model.errors import MachineLacks, NotFound
from gpuckpt.system import procfs


@pytest.fixture
def child(jobs):
    return jobs.start("/bin/sleep", "1000").pid


@pytest.mark.parametrize("text", ["{pid}", "{pid}\n", "  {pid} \n", "{pid}\n/var/lib/data\n1700000000\n"])
def test_the_pid_in_a_file(work, child, text):
    file = work / "pid"
    file.write_text(text.format(pid=child))
    assert treename.pid_in_file(file) == child
    assert treename.pid_of(0, file, None) == child


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "it is empty"),
        (b"\n\n", "it is empty"),
        (b"job", "it holds 'job', no process id"),
        (b"12 34", "it holds '12 34'"),
        (b"-5", "it holds '-5'"),
        (b"0", "it holds '0'"),
        (b"99999999999999999999", "no process id"),
        ("٣".encode(), "no process id"),
        (b"\0\xff", "no process id"),
        (b"9" * 100_000, "no process id"),
        (b"4194303", "names process 4194303, which does not exist"),
    ],
)
def test_a_file_that_names_no_process(work, content, words):
    file = work / "pid"
    file.write_bytes(content)
    with pytest.raises(NotFound) as caught:
        treename.pid_in_file(file)
    assert words in caught.value.message
    assert str(file) in caught.value.message
    assert caught.value.hint
    assert len(caught.value.message) < 300


@pytest.mark.parametrize("kind", ["missing", "directory", "fifo"])
def test_a_file_that_is_none(work, kind):
    place = work / "pid"
    {"missing": lambda: None, "directory": place.mkdir, "fifo": lambda: os.mkfifo(place)}[kind]()
    with pytest.raises(NotFound) as caught:
        treename.pid_in_file(place)
    assert str(place) in caught.value.message
    assert caught.value.hint


def test_a_file_that_is_older_than_its_process_was_anothers(work, child):
    file = work / "pid"
    file.write_text(str(child))
    started = procfs.started_at(procfs.process_id(child))
    assert abs(started - time.time()) < 30
    os.utime(file, (started + 0.1, started + 0.1))
    assert treename.pid_in_file(file) == child
    os.utime(file, (started - 10, started - 10))
    with pytest.raises(NotFound, match=rf"is older than process {child} sleep") as caught:
        treename.pid_in_file(file)
    assert f"--tree {child}" in caught.value.hint


ANSWERS = """#!/bin/sh
printf '%s\\n' "$*" > '{asked}'
{answer}
"""


@pytest.fixture
def systemctl(work, monkeypatch):
    """A systemctl that answers as told; what it was asked stands in the file that is returned."""

    def make(answer: str) -> Path:
        program = work / "systemctl"
        program.write_text(ANSWERS.format(asked=work / "asked", answer=answer))
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{work}:/usr/bin:/bin")
        return work / "asked"

    return make


def test_the_main_process_of_a_unit(systemctl):
    asked = systemctl("echo 4242")
    assert treename.pid_of(0, None, "llm@7.service") == 4242
    assert asked.read_text() == "show -p MainPID --value -- llm@7.service\n"


@pytest.mark.parametrize(
    ("answer", "kind", "words"),
    [
        ("echo 0", NotFound, "the unit llm has no main process"),
        ("echo", NotFound, "has no main process"),
        ("echo '[not set]'", NotFound, "has no main process"),
        ("echo 'System has not been booted with systemd' >&2; exit 1", MachineLacks, "System has not been booted"),
        ("kill -9 $$", MachineLacks, "was ended by SIGKILL"),
    ],
)
def test_a_unit_without_one(systemctl, answer, kind, words):
    systemctl(answer)
    with pytest.raises(kind) as caught:
        treename.main_pid("llm")
    assert words in caught.value.message
    assert "\n" not in caught.value.message
    assert caught.value.hint


def test_without_systemd(work, monkeypatch):
    monkeypatch.setenv("PATH", str(work))
    monkeypatch.setattr("gpuckpt.system.commands.EXTRA_DIRECTORIES", ())
    with pytest.raises(MachineLacks, match="no systemctl"):
        treename.main_pid("llm")

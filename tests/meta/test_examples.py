"""The samples below man/examples: what they name exists, and what they run is what their comments say."""

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from gpuckpt.cli.config import Option, configuration
from gpuckpt.cli.configfile import read_files
from gpuckpt.cli.manual.generate import ENDINGS, files, parser

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "man" / "examples"
OPTIONS = {
    command: {max(item.opts, key=len).removeprefix("--"): item for item in parser(command).params}
    for command in ENDINGS
}


def read(name, tmp_path):
    """A sample as gpuckpt reads it, from a file of our own."""
    copy = tmp_path / name
    copy.write_text((EXAMPLES / name).read_text())
    copy.chmod(0o600)
    known = {
        command: {
            name: Option(flag=bool(getattr(item, "is_flag", False)), number=True) for name, item in options.items()
        }
        for command, options in OPTIONS.items()
    }
    return configuration(read_files(str(copy)), known)


@pytest.fixture
def curl(tmp_path, monkeypatch):
    """A `curl` on PATH that writes down what it is told and what it is given."""
    place = tmp_path / "bin"
    place.mkdir()
    (place / "curl").write_text(f'#!/bin/sh\necho "$@" >>{tmp_path}/called\ncat >>{tmp_path}/sent\n')
    (place / "curl").chmod(0o755)
    monkeypatch.setenv("PATH", f"{place}:{os.environ['PATH']}")
    (tmp_path / "called").touch()

    def called(line, **variables):
        environment = {**os.environ, **{f"GPUCKPT_{name.upper()}": value for name, value in variables.items()}}
        before = len((tmp_path / "called").read_text().splitlines())
        done = subprocess.run(["/bin/sh", "-c", line], stdin=subprocess.DEVNULL, env=environment, timeout=60)
        assert done.returncode == 0
        return (tmp_path / "called").read_text().splitlines()[before:]

    return called


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.toml")), ids=lambda path: path.name)
def test_a_configuration_is_accepted(path, tmp_path):
    found = read(path.name, tmp_path)
    assert found.commands or found.hosts


@pytest.mark.parametrize(
    "path", sorted(path for path in EXAMPLES.iterdir() if path.is_file()), ids=lambda path: path.name
)
def test_options_in_its_text_exist(path):
    text = path.read_text().replace("\\\n#", "")
    for command, rest in re.findall(r"gpuckpt (\w+) ((?:.*--.*))", text):
        named = set(re.findall(r"(?<!\S)--([a-z][a-z-]*)", rest)) - {"show-config"}
        assert named <= OPTIONS[command].keys()


def test_vllm_sleeps_for_a_dump_and_is_woken_where_it_lives_on(tmp_path, curl):
    found = read("vllm.toml", tmp_path)
    dump, restore = found.commands["dump"], found.commands["restore"]
    (sleep,) = curl(dump["pre-dump"].value)
    assert sleep.endswith("-X POST http://127.0.0.1:8000/sleep?level=1")
    for process, wakes in (("ended", 0), ("running", 1), ("untouched", 1), ("frozen", 1), ("", 1)):
        woken = curl(dump["post-dump"].value, process=process)
        assert [line.rpartition("/")[2] for line in woken] == ["wake_up"] * wakes, process
    assert len(curl(restore["post-restore"].value, outcome="ok")) == 1
    assert curl(restore["post-restore"].value, outcome="failed") == []


def test_a_service_is_registered_only_when_it_is_ready(tmp_path, curl):
    line = f"{EXAMPLES / 'register-service'} llm 8000"
    told = {"host": "gpu7", "image_id": "abc"}
    assert curl(line, outcome="failed", **told) == []
    (called,) = curl(line, outcome="ok", **told)
    assert "http://127.0.0.1:8500/v1/agent/service/register" in called
    sent = json.loads((tmp_path / "sent").read_text())
    assert (sent["ID"], sent["Port"], sent["Meta"]) == ("llm-gpu7", 8000, {"gpuckpt-image": "abc"})


def test_every_page_and_the_examples_are_installed():
    text = (ROOT / "pyproject.toml").read_text()
    for name in files():
        if name.startswith("man/"):
            assert f'"{name}" = "share/man/man1/{name.removeprefix("man/")}"' in text
    assert '"man/examples" = "share/doc/gpuckpt/examples"' in text

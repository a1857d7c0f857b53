"""The samples that are installed beside the man pages: every command in them is one that gpuckpt takes."""

from __future__ import annotations

import configparser
import os
import re
import shlex
import stat
from pathlib import Path

import pytest

from gpuckpt.cli.manual.generate import ENDINGS, parser

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "man" / "examples"
UNITS = sorted(EXAMPLES.glob("*@.*"))
PROGRAM = "/usr/local/bin/gpuckpt"


def words_of(line: str) -> list[str]:
    """The words behind the program; systemd's %i and %% as for an instance."""
    return shlex.split(line.replace("%%", "%").replace("%i", "train"))


def understood(argv: list[str]) -> dict:
    """What the parser of the verb makes of it; an option or a value that it does not know is an exception."""
    verb, *arguments = argv
    program = parser("")
    with program.make_context("gpuckpt", [verb, "--help"]) as around:
        return program.commands[verb].make_context(verb, arguments, parent=around).params


def unit(path: Path) -> configparser.ConfigParser:
    found = configparser.ConfigParser(interpolation=None, comment_prefixes=("#",), delimiters=("=",), strict=True)
    found.optionxform = str
    found.read_string(path.read_text(encoding="utf-8"))
    return found


def test_all_samples_are_known_here_and_in_the_manual():
    assert {path.name for path in UNITS} == {"gpuckpt@.service", "gpuckpt@.timer", "gpuckpt-restore@.service"}
    page = (ROOT / "man" / "gpuckpt-dump.1").read_text(encoding="utf-8").replace("\\-", "-")
    for name in ("gpuckpt.cron", "gpuckpt.slurm", *(path.name for path in UNITS)):
        assert (EXAMPLES / name).is_file()
        assert name in page, name


def test_the_line_of_the_crontab():
    lines = [line for line in (EXAMPLES / "gpuckpt.cron").read_text().splitlines() if line and not line.startswith("#")]
    assert [line for line in lines if re.match(r"[A-Z]+=", line)] == ["MAILTO=root"]
    (line,) = (line for line in lines if not re.match(r"[A-Z]+=", line))
    assert "%" not in line.replace("\\%", ""), "cron takes % for the end of the line"
    *times, user, program = line.split(None, 6)[:7]
    assert (len(times), user) == (5, "root")
    assert program.split()[0] == PROGRAM
    params = understood(words_of(program)[1:])
    assert (params["keep"], params["keep_within"], params["leave_running"]) == (6, 86400.0, True)
    assert (params["into"], params["pid_file"]) == ("/var/lib/gpuckpt/train", "/run/train.pid")


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_units_have_the_form_that_systemd_reads(path):
    found = unit(path)
    assert "Description" in found["Unit"]
    assert set(found.sections()) <= {"Unit", "Service", "Timer", "Install"}
    if path.suffix == ".timer":
        assert (path.parent / path.with_suffix(".service").name).is_file()
        return
    service = found["Service"]
    assert (service["KillMode"], service["OOMPolicy"]) == ("mixed", "continue")
    argv = words_of(service["ExecStart"])
    assert argv[0] == PROGRAM
    params = understood(argv[1:])
    if argv[1] == "restore":
        assert (params["wait"], params["image"]) == (True, "/var/lib/gpuckpt/train/latest")
    else:
        assert (params["unit"], params["into"]) == ("train.service", "/var/lib/gpuckpt/train")
        assert service["StateDirectory"].replace("%i", "train") == "gpuckpt/train"
        assert params["min_free"] == "10%"


def test_the_script_uses_options_that_exist():
    text = (EXAMPLES / "gpuckpt.slurm").read_text()
    known = {name for verb in ENDINGS for item in parser(verb).params for name in item.opts}
    lines = [line for line in text.splitlines() if "$gpuckpt" in line and not line.startswith("gpuckpt=")]
    assert len(lines) == 2
    assert {word for line in lines for word in re.findall(r"--[a-z-]+", line)} <= known
    assert "#SBATCH --signal=B:USR1@120" in text
    assert "#SBATCH --requeue" in text
    assert "stands in for Slurm's" in text
    assert os.stat(EXAMPLES / "gpuckpt.slurm").st_mode & stat.S_IXUSR


def test_the_wheel_has_every_page_and_the_samples():
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    for path in (ROOT / "man").glob("*.1"):
        assert f'"man/{path.name}" = "share/man/man1/{path.name}"' in text, path.name
    assert '"man/examples" = "share/doc/gpuckpt/examples"' in text

"""Configuration files: which of them holds, what they may say, and that the command line has the last word."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from cli_samples import dump_report, restore_report
from hypothesis import given
from hypothesis import strategies as st

from gpuckpt.cli import configfile
from gpuckpt.cli.config import HOST_OPTIONS, OF_ONE_RUN, Option, configuration
from gpuckpt.cli.configfile import ConfigFile, read_files, user_file
from gpuckpt.cli.manual.generate import ENDINGS, parser
from gpuckpt.model.errors import UsageError
from gpuckpt.model.location import Location
from gpuckpt.model.requests import DumpRequest, Into, RepairRequest
from gpuckpt.model.series import MinFree, Rules

OPTIONS = {
    "dump": {
        "level": Option(number=True),
        "plain": Option(flag=True),
        "capture-files": Option(multiple=True),
        "timeout": Option(number=True),
        "quiet": Option(flag=True),
    },
    "push": {
        "bwlimit": Option(number=True),
        "connections": Option(number=True),
        "ssh-config": Option(path=True),
        "remote-command": Option(),
        "timeout": Option(number=True),
        "quiet": Option(flag=True),
    },
}
ROOT = Path(__file__).parents[2]
RECIPIENT = "age1ugtg63757shac6f4y9vfaqwfz0kklpgxjrdjjvxgw4rwu0pd5vtsprltug"
LOW, HIGH = Path("/low"), Path("/high")


def judged(low=None, high=None):
    return configuration((ConfigFile(LOW, low), ConfigFile(HIGH, high)), OPTIONS)


@pytest.fixture
def file(tmp_path):
    """Write a configuration; returns its path as text."""

    def write(text: str, name: str = "config.toml") -> str:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o600)
        return str(path)

    return write


# which files


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"HOME": "/h"}, "/h/.config/gpuckpt/config.toml"),
        ({"HOME": "/h", "XDG_CONFIG_HOME": "/x"}, "/x/gpuckpt/config.toml"),
        ({"HOME": "/h", "XDG_CONFIG_HOME": "x"}, "/h/.config/gpuckpt/config.toml"),
        ({"HOME": "/home/alice", "XDG_CONFIG_HOME": "/home/alice/x", "SUDO_UID": "1000"}, "root's"),
        ({"HOME": "/home/alice", "DOAS_USER": "alice"}, "root's"),
        ({"HOME": "relative"}, "root's"),
        ({}, "root's"),
    ],
)
def test_the_users_file(environment, expected, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    expected = f"{Path('~root').expanduser()}/.config/gpuckpt/config.toml" if expected == "root's" else expected
    assert str(user_file(environment)) == expected


def test_the_users_file_is_over_the_systems_and_an_explicit_one_replaces_both(
    file, flow, gpuckpt, monkeypatch, tmp_path
):
    flow.answer = dump_report()
    monkeypatch.delenv("GPUCKPT_CONFIG")
    monkeypatch.delenv("SUDO_UID", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "xdg"))
    monkeypatch.setattr(configfile, "SYSTEM", Path(file("[dump]\nlevel = 3\nworkers = 2\nplain = true", "etc.toml")))
    file("[dump]\nlevel = 9", "xdg/gpuckpt/config.toml")
    argv = ("dump", "--tree", "7", str(tmp_path / "img"))
    for extra in ((), ("--level", "none", "--no-plain"), ("--config", file("[dump]\ntcp = 'keep'"))):
        assert gpuckpt(*argv, *extra)[0] == 0
    plain, typed, explicit = flow.requests
    assert (plain.level, plain.workers, plain.plain) == (9, 2, True)
    assert (typed.level, typed.workers, typed.plain) == (None, 2, False)
    assert (explicit.level, explicit.workers, explicit.plain, explicit.tcp) == (-1, None, False, "keep")
    monkeypatch.setenv("GPUCKPT_CONFIG", file("[dump]\nsettle = 0.5"))
    flow.requests.clear()
    gpuckpt(*argv)
    assert (flow.request.level, flow.request.settle_seconds) == (-1, 0.5)


def test_an_explicit_file_must_exist_and_dev_null_is_none(tmp_path):
    for name in (str(tmp_path / "nothing"), ""):
        with pytest.raises(UsageError):
            read_files(name)
    assert read_files("/dev/null")[0].content == {}


# reading with suspicion


def refused(name: str) -> str:
    with pytest.raises(UsageError) as error:
        read_files(name)
    assert name in error.value.message
    assert error.value.hint
    return error.value.message


def test_what_is_no_file_of_text_is_refused_at_once(tmp_path, file):
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "directory").mkdir()
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "latin").write_bytes(b"[dump]\n# caf\xe9\n")
    (tmp_path / "deep").write_text("a = " + "[" * 100_000)
    (tmp_path / "digits").write_text("a = " + "9" * 5000)
    with (tmp_path / "huge").open("w") as huge:
        huge.truncate(1 << 30)
    for name in ("fifo", "directory", "loop", "latin", "deep", "digits", "huge"):
        os.chmod(tmp_path / name, 0o600) if name != "loop" else None
        refused(str(tmp_path / name))
    assert "line 2" in refused(str(tmp_path / "latin"))
    assert "line 3" in refused(file("[dump]\nlevel = 3\nlevel == 4\n"))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root is asked to be careful")
def test_what_others_can_change_is_refused_for_root(tmp_path, file):
    path = file("[dump]\nlevel = 3")
    (tmp_path / "link").symlink_to(path)
    assert read_files(str(tmp_path / "link"))[0].content == {"dump": {"level": 3}}
    for mode in (0o620, 0o602):
        os.chmod(path, mode)
        assert "others could change it" in refused(str(tmp_path / "link"))
    os.chmod(path, 0o600)
    os.chown(path, 12345, 0)
    assert "belongs to user 12345" in refused(path)
    os.chown(path, 0, 0)
    tmp_path.chmod(0o777)
    assert "0777" in refused(path)
    tmp_path.chmod(0o700)


# what they may say


@pytest.mark.parametrize(
    ("content", "key", "hint"),
    [
        ({"dmp": {}}, "[dmp]", "did you mean dump?"),
        ({"level": 3}, "level", "[dump]"),
        ({"dump": {"leevl": 3}}, "[dump] leevl", "did you mean level?"),
        ({"dump": {"capture_files": "all"}}, "[dump] capture_files", "did you mean capture-files?"),
        ({"dump": {"bwlimit": "3M"}}, "[dump] bwlimit", "it belongs to [push]"),
        ({"dump": {"tree": 4}}, "[dump] tree", "command line"),
        ({"dump": {"level": True}}, "[dump] level", "number"),
        ({"dump": {"level": [3]}}, "[dump] level", "number"),
        ({"dump": {"plain": "yes"}}, "[dump] plain", "true or false"),
        ({"dump": {"plain": 1}}, "[dump] plain", "true or false"),
        ({"dump": {"capture-files": [1]}}, "[dump] capture-files", "list"),
        ({"dump": {"capture-files": ["a", "b\0"]}}, "[dump] capture-files", "no option can"),
        ({"push": {"remote-command": 3}}, "[push] remote-command", "string in quotes"),
        ({"push": {"ssh-config": "cfg"}}, "[push] ssh-config", "begin it with /"),
        ({"host": {"a": 3}}, '[host."a"]', "[dump]"),
        ({"host": {"gpu7": {"example": {"bwlimit": "3M"}}}}, '[host."gpu7"]', "in quotes"),
        ({"host": {"a": {"level": 3}}}, '[host."a"] level', "it belongs to [dump]"),
    ],
    ids=str,
)
def test_what_is_wrong_is_named_with_file_and_key(content, key, hint):
    for files in ((content, None), (None, content)):
        with pytest.raises(UsageError) as error:
            judged(*files)
        assert error.value.message.startswith(f"{LOW if files[0] else HIGH}: {key}: ")
        assert hint in error.value.hint


def test_a_table_of_a_host_is_over_that_of_the_command_and_only_for_that_host():
    found = judged(
        {
            "push": {"bwlimit": "1M", "timeout": 9, "connections": 2},
            "host": {"a": {"bwlimit": "2M"}, "me@a": {"bwlimit": "4M"}},
        },
        {"push": {"bwlimit": "3M"}, "host": {"a": {"connections": 8}}},
    )

    def of(where, command="push"):
        return {name: one.value for name, one in found.for_run(command, OPTIONS[command], where).items()}

    assert of(Location("b")) == {"bwlimit": "3M", "timeout": "9", "connections": "2"}
    assert of(Location("you@a")) == {"bwlimit": "2M", "timeout": "9", "connections": "8"}
    assert of(Location("me@a")) == {"bwlimit": "4M", "timeout": "9", "connections": "8"}
    assert of(None) == {"timeout": "9"}, "how a host is reached is nothing to a run on this one"
    assert of(Location("a"), "dump") == {}


VALUES = {
    "level": st.integers(-5, 19),
    "timeout": st.floats(0.1, 1e6),
    "plain": st.booleans(),
    "quiet": st.booleans(),
    "capture-files": st.lists(st.sampled_from(["all", "/x", "*.log"]), min_size=1),
}
TABLES = st.fixed_dictionaries({}, optional=VALUES)


@given(low=TABLES, high=TABLES)
def test_the_stronger_file_wins_key_by_key(low, high):
    settings = judged({"dump": low}, {"dump": high}).for_run("dump", OPTIONS["dump"], None)
    assert settings.keys() == low.keys() | high.keys()
    for name, setting in settings.items():
        source, path = (high, HIGH) if name in high else (low, LOW)
        value = source[name]
        assert setting.path == path
        assert setting.value == (value if isinstance(value, (bool, list)) else str(value))


def test_every_option_is_of_one_run_or_can_stand_in_a_file(file, gpuckpt):
    """What no file may say exists, and a file may repeat every default of all the rest."""
    options = {name for command in ENDINGS for item in parser(command).params for name in item.opts}
    assert {f"--{name}" for name in (*OF_ONE_RUN, *HOST_OPTIONS)} <= options
    defaults = [value for value in shown(gpuckpt) if value["value"] is not None]
    assert {value["command"] for value in defaults} == set(ENDINGS)
    tables = [
        f"[{command}]\n"
        + "".join(f"{one['option']} = {json.dumps(one['value'])}\n" for one in defaults if one["command"] == command)
        for command in ENDINGS
    ]
    path = file("".join(tables))
    repeated = [value for value in shown(gpuckpt, "--config", path) if value["from"] == path]
    assert [str(value["value"]) for value in repeated] == [str(value["value"]) for value in defaults]


def shown(gpuckpt, *argv):
    status, out, _ = gpuckpt("inspect", "--show-config", "--json", *argv)
    assert status == 0
    return json.loads(out)["data"]["values"]


# a run


def test_a_value_that_the_option_refuses_is_named_with_its_file(file, gpuckpt, flow):
    for line, why in (("timeout = 0", "too short"), ("tcp = 'foo'", "'refuse', 'keep', 'close'"), ("level = 99", "19")):
        path = file(f"[dump]\n{line}")
        status, _, err = gpuckpt("dump", "--tree", "1", "img", "--config", path)
        assert status == 2
        assert f"{path}: [dump] {line.split()[0]}: " in err
        assert why in err
    path = file("[dump]\ncapture-files = ['none', 'all']")
    status, _, err = gpuckpt("dump", "--tree", "1", "img", "--config", path)
    assert (status, f"capture-files comes from {path}" in err) == (2, True)
    # What was typed is not the file's.
    _, _, err = gpuckpt(
        "dump", "--tree", "1", "img", "--config", path, *["--capture-files", "none", "--capture-files", "all"]
    )
    assert path not in err


def test_a_broken_table_of_another_command_is_an_error_too(file, gpuckpt, flow):
    status, _, err = gpuckpt("dump", "--tree", "1", "img", "--config", file("[push]\nconnections = 0"))
    assert status == 2
    assert "[push] connections" in err


def test_defaults_for_a_restore_do_not_forbid_a_repair(file, gpuckpt, flow):
    flow.answer = restore_report()
    path = file("[restore]\nplain = true\nhuge-pages = true\ntimeout = 9\n[inspect]\nssh-config = '/x'")
    assert gpuckpt("restore", "--tree", "7", "--config", path)[0] == 0
    assert flow.request == RepairRequest(pid=7, timeout_seconds=9.0)
    assert gpuckpt("inspect", "--config", path)[0] == 0


def test_a_key_for_images_here_does_not_forbid_a_look_at_one_elsewhere(file, gpuckpt, flow):
    flow.answer = restore_report()
    path = file("[inspect]\nidentity = '/k'")
    assert gpuckpt("inspect", "gpu7:/srv/job", "--config", path)[0] == 0
    status, _, err = gpuckpt("inspect", "gpu7:/srv/job", "--identity", "/k", "--config", path)
    assert status == 2
    assert "--identity needs an image of this host" in err


def test_the_host_that_is_asked_about_an_image_is_reached_by_its_table(file, gpuckpt, flow, tmp_path):
    flow.answer = restore_report()
    path = file("[inspect]\nidentity = '/k'\n[host.gpu7]\nssh-config = '/x'\nremote-command = 'sudo -n gpuckpt'")
    assert gpuckpt("inspect", str(tmp_path), "--against", "me@gpu7:", "--config", path)[0] == 0
    reach = flow.request.against
    assert (reach.ssh_config, reach.remote_command) == (Path("/x"), "sudo -n gpuckpt")
    assert flow.request.identity == Path("/k")


def test_rules_of_a_series_do_not_forbid_a_dump_that_goes_into_none(file, gpuckpt, flow, tmp_path):
    flow.answer = dump_report()
    path = file("[dump]\nkeep = 6\nkeep-within = '24h'\nmin-free = '10%'\nfull-every = '1d'")
    assert gpuckpt("dump", "--tree", "7", str(tmp_path / "img"), "--config", path)[0] == 0
    assert gpuckpt("dump", "--tree", "7", "--into", str(tmp_path), "--keep", "3", "--config", path)[0] == 0
    plain, series = flow.requests
    assert plain == DumpRequest(pid=7, image=tmp_path / "img")
    assert series.into == Into(tmp_path, None, Rules(3, 86400.0, MinFree(share=0.1)), full_every_seconds=86400.0)


@pytest.mark.parametrize(
    "line", ["into = '/srv'", "name = 'a'", "pid-file = '/x'", "unit = 'u'", "push = 'h:/d'", "no-base = true"]
)
def test_which_job_and_where_it_goes_is_said_on_the_command_line(file, gpuckpt, flow, tmp_path, line):
    status, _, err = gpuckpt("dump", "--tree", "7", str(tmp_path / "img"), "--config", file(f"[dump]\n{line}"))
    assert (status, flow.requests) == (2, [])
    assert "it belongs to one run" in err


def test_help_and_tab_read_no_file(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    environment = {**os.environ, "GPUCKPT_CONFIG": str(tmp_path / "fifo")}
    for argv in (["dump", "--help"], ["--version"]):
        done = subprocess.run(
            [sys.executable, "-m", "gpuckpt", *argv], env=environment, capture_output=True, timeout=60
        )
        assert done.returncode == 0
    tab = {"_GPUCKPT_COMPLETE": "complete_bash", "COMP_WORDS": "gpuckpt dump --lev", "COMP_CWORD": "2"}
    code = "import sys; sys.argv = ['gpuckpt']; from gpuckpt.cli.app import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code], env={**environment, **tab}, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.split() == ["--level"]


def test_show_config_says_where_each_value_comes_from(file, gpuckpt):
    path = file("[dump]\nlevel = 3\n[host.'gpu7.example']\nremote-command = 'sudo -n gpuckpt'")
    status, out, _ = gpuckpt("inspect", "--show-config", "--config", path)
    assert status == 0
    words = "".join(out.split())  # a long path goes on in the next line
    assert f"level3from{path}" in words
    assert "tcprefusedefault" in words
    assert '[host."gpu7.example"]' in out
    assert "2 options set by files" in out
    assert gpuckpt("inspect", "--show-config", "--tree", "1")[0] == 2


AS_NOBODY = """
import os, sys
from gpuckpt.cli.configfile import read_files
os.setgroups([])
os.setresgid(65534, 65534, 65534)
os.setresuid(65534, 65534, 65534)
print(read_files(None)[1].content)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
def test_what_a_user_may_not_even_look_for_is_not_that_users():
    """A shell of another user with root's HOME. A file of one's own that cannot be read is an error all the same."""
    said = {}
    with tempfile.TemporaryDirectory() as place:
        os.chmod(place, 0o711)
        for home, mode in (("hidden", 0o700), ("own", 0o711)):
            above = Path(place, home, ".config", "gpuckpt")
            above.mkdir(parents=True)
            (above / "config.toml").touch(0o000)
            Path(place, home).chmod(mode)
            environment = {"HOME": f"{place}/{home}", "PATH": os.environ["PATH"]}
            done = subprocess.run(
                [sys.executable, "-c", AS_NOBODY], env=environment, cwd=ROOT, capture_output=True, text=True, timeout=60
            )
            said[home] = done.stdout.strip() or done.stderr.splitlines()[-1]
    assert said["hidden"] == "None"
    assert "config.toml: Permission denied" in said["own"]


@pytest.mark.parametrize("kept", [("--keep-image", "/srv/kept"), ("gpu7:/srv/kept",)])
def test_no_migration_keeps_an_image_in_clear_where_every_dump_is_encrypted(file, gpuckpt, flow, kept):
    flow.answer = restore_report()
    path = file(f"[dump]\nencrypt-to = '{RECIPIENT}'")
    target = kept if len(kept) == 1 else (*kept, "gpu7:")
    status, _, err = gpuckpt("migrate", "--tree", "7", *target, "--config", path)
    assert status == 20
    assert f"[dump] encrypt-to of {path}" in err
    assert gpuckpt("migrate", "--tree", "7", "gpu7:", "--config", path)[0] == 0
    assert gpuckpt("migrate", "--tree", "7", *target, "--config", file("", "other"))[0] == 0

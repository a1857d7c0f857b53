"""The committed pages and scripts are what the parser, the errors and the checks say today."""

import difflib
import shutil
import subprocess
from functools import cache
from pathlib import Path

import pytest

import gpuckpt
from gpuckpt.cli.checklist import known_checks
from gpuckpt.cli.manual import generate
from gpuckpt.cli.manual.generate import ENDINGS, LISTS, parser
from gpuckpt.model import errors

ROOT = Path(__file__).parents[2]
files, page = cache(generate.files), cache(generate.page)


@pytest.mark.parametrize("name", sorted(files()))
def test_committed_file_is_the_generated_one(name):
    committed = (ROOT / name).read_text(encoding="utf-8").splitlines()
    difference = list(
        difflib.unified_diff(committed, files()[name].splitlines(), "committed", "generated", lineterm="")
    )
    assert not difference, "run `python -m gpuckpt.cli.manual .`\n" + "\n".join(difference)


def test_no_page_or_script_is_left_over():
    found = {
        f"{folder}/{path.name}"
        for folder in ("man", "completions")
        for path in (ROOT / folder).iterdir()
        if path.is_file()
    }
    assert found == set(files())


def test_every_command_has_a_page_and_every_page_its_sections():
    assert set(ENDINGS) == {name for name, command in parser("").commands.items() if not command.hidden}
    for command in ("", *ENDINGS):
        text = page(command)
        for section in ("NAME", "SYNOPSIS", "DESCRIPTION", '"EXIT STATUS"', "FILES", "ENVIRONMENT", "EXAMPLES"):
            assert f".SH {section}\n" in text, (command, section)
    for command in LISTS:
        assert ".SH CHECKS\n" in page(command)


def test_every_option_is_on_its_page():
    for command in ENDINGS:
        for item in parser(command).params:
            if item.param_type_name == "option" and not item.hidden:
                assert item.opts[0].replace("-", "\\-") in page(command), (command, item.opts)
                assert item.help, (command, item.opts)
                assert item.metavar or not item.opts[0].startswith("--") or item.default in (False, None), item.opts
            assert (
                item.param_type_name != "option"
                or not item.hidden
                or item.opts[0].replace("-", "\\-") not in page(command)
            )


def test_every_check_is_on_its_page():
    for command, checks in LISTS.items():
        assert known_checks(checks)
        for check in known_checks(checks):
            assert f".BR {check.id.replace('-', chr(92) + '-')} " in page(command)


def test_every_failure_is_on_a_page():
    kinds = {kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.GpuckptError)}
    assert set().union(*ENDINGS.values()) == kinds
    for kind in kinds - {errors.Interrupted}:
        assert f".B {kind.status}\n" in page("")


def test_pages_are_the_same_every_day():
    assert f'1 2026-11-30 "gpuckpt {gpuckpt.__version__}"' in page("").splitlines()[0]
    assert generate.page("dump") == page("dump")


@pytest.mark.skipif(shutil.which("mandoc") is None, reason="mandoc is not installed here")
@pytest.mark.parametrize("name", sorted(name for name in files() if name.startswith("man/")))
def test_mandoc_has_nothing_to_say(name):
    done = subprocess.run(
        ["mandoc", "-T", "lint", ROOT / name], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout + done.stderr == ""

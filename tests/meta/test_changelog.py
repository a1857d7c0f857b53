"""CHANGELOG.md speaks about the version that is built."""

import re
from pathlib import Path

import gpuckpt
from gpuckpt.cli.manual.generate import ENDINGS

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
KINDS = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


def test_the_version_has_a_heading():
    headings = re.findall(r"^## \[([^]]+)\]", TEXT, flags=re.MULTILINE)
    assert headings
    assert headings[0] in ("Unreleased", gpuckpt.__version__)


def test_headings_are_those_of_keep_a_changelog():
    assert set(re.findall(r"^### (.+)$", TEXT, flags=re.MULTILINE)) <= KINDS


def test_every_command_has_an_entry():
    for command in ENDINGS:
        assert f"`gpuckpt {command}" in TEXT

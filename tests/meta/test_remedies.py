"""What a message tells the user to type exists: every --option is gpuckpt's own, or one of a command named with it."""

import ast
import re
from pathlib import Path

import pytest

from gpuckpt.cli.manual.generate import ENDINGS, parser
from gpuckpt.system import criu_causes

PACKAGE = Path(__file__).parents[2] / "gpuckpt"
OWN = {name for verb in ENDINGS for item in parser(verb).params for name in item.opts if not item.hidden}
FOREIGN = {
    "container": {"--cap-add"},
    "crictl checkpoint": {"--export"},
    "incus stop": {"--stateful"},
    "lxc stop": {"--stateful"},
    "prlimit": {"--pid", "--as"},
    "systemctl edit": {"--runtime"},
}
SPOKEN = ("checks", "flows", "model", "owner", "stores")
"""Where texts for users are made."""
STARTED_HERE = {
    "gather.py": {"--property", "--value"},
    "treename.py": {"--value"},
    "extract.py": {"--action", "--pid"},
    "capturing.py": {"--stream"},
}
"""Options of other programs: of systemctl, which is started; of cuda-checkpoint, whose commands `inspect --extract`
prints; of CRIU, in the reason why a dump took the plain path."""
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]*[a-z]")


def _texts(path):
    """Every literal of a module that is no docstring."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    said = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in said:
            yield node.value


def _strange(text):
    for option in OPTION.findall(text):
        if option not in OWN and not any(command in text and option in options for command, options in FOREIGN.items()):
            yield option


@pytest.mark.parametrize("path", [p for folder in SPOKEN for p in sorted((PACKAGE / folder).glob("*.py"))], ids=str)
def test_every_option_in_a_message_exists(path):
    strange = {option for text in _texts(path) for option in _strange(text)}
    assert strange <= STARTED_HERE.get(path.name, set())


ROWS = [*criu_causes.ROWS, *criu_causes.LAST_LINE_ROWS, criu_causes.CRASHED, criu_causes.KILLED]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)
def test_every_remedy_can_be_carried_out(row):
    assert list(_strange(row.remedy)) == []
    assert "CRIU's --" not in row.remedy

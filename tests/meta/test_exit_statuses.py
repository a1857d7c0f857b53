"""Every published exit status is what a real run of gpuckpt was seen to end with: asserted, not only marked."""

from __future__ import annotations

import ast
from pathlib import Path

from gpuckpt.model import errors

TESTS = Path(__file__).parents[1]
REAL = ("e2e", "faults")
"""Where tests run the program itself, on real processes."""

KINDS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.GpuckptError)]
PUBLISHED = {0, *(kind.status for kind in KINDS)}

SEEN = ("status", "returncode")


def asserted(source: str) -> set[int]:
    """The statuses that the assertions of a module demand; 128 for `128 + number`."""
    compared = (
        node.test
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Assert) and isinstance(node.test, ast.Compare)
    )
    return {
        status
        for test in compared
        if len(test.ops) == 1 and isinstance(test.ops[0], ast.Eq)
        for left, right in _pairs(test.left, test.comparators[0])
        if isinstance(left, ast.Attribute) and left.attr in SEEN
        for status in _number(right)
    }


def _pairs(left: ast.expr, right: ast.expr) -> list[tuple[ast.expr, ast.expr]]:
    """`a == b`, and `(a, c) == (b, d)` member by member."""
    if isinstance(left, ast.Tuple) and isinstance(right, ast.Tuple):
        return list(zip(left.elts, right.elts, strict=False))
    return [(left, right)]


def _number(node: ast.expr) -> list[int]:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _number(node.left)
    return [node.value] if isinstance(node, ast.Constant) and isinstance(node.value, int) else []


def test_every_exit_status_is_reached():
    sources = [path.read_text(encoding="utf-8") for folder in REAL for path in (TESTS / folder).glob("test_*.py")]
    reached = set().union(*map(asserted, sources))
    assert PUBLISHED - reached == set()


def test_nothing_is_reached_that_is_not_published_or_the_jobs_own():
    """A status of `--wait` is the job's own, 7 and 137 in those tests."""
    sources = {
        path.name: path.read_text(encoding="utf-8") for folder in REAL for path in (TESTS / folder).glob("test_*.py")
    }
    strange = {name: asserted(text) - PUBLISHED for name, text in sources.items() if name != "test_wait.py"}
    assert {name: found for name, found in strange.items() if found} == {}


def test_only_assertions_about_a_run_count():
    assert asserted("assert answer.status == 31") == {31}
    assert asserted("assert (answer.status, answer.report['process']) == (40, 'untouched')") == {40}
    assert asserted("assert shot.main.returncode == 128 + number") == {128}
    assert asserted("assert answer.status in (0, 41)\nanswer.status == 22\nassert answer.count == 10") == set()

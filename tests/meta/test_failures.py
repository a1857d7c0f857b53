"""tests/FAILURES.md tells the truth: the tests and checks it names exist, and each failure has one or a reason."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from gpuckpt import checks

TESTS = Path(__file__).parents[1]
ROWS = [
    [cell.strip() for cell in line.strip("|\n").split("|")]
    for line in (TESTS / "FAILURES.md").read_text(encoding="utf-8").splitlines()
    if line.startswith("| ") and not line.startswith("| failure")
]
TEST = re.compile(r"`([\w/]+\.py)::(\w+)`")
CHECK = re.compile(r"\bcases? ((?:`[a-z-]+`(?:, )?)+)")
CHECK_IDS = {check.id for check in (*checks.DUMP_CHECKS, *checks.RESTORE_CHECKS)}


@cache
def functions(path: str) -> set[str]:
    tree = ast.parse((TESTS / path).read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def checks_in(text: str) -> set[str]:
    return {name for found in CHECK.findall(text) for name in re.findall(r"`([a-z-]+)`", found)}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_what_is_named_exists(row):
    _, text = row
    missing = [f"{path}::{name}" for path, name in TEST.findall(text) if name not in functions(path)]
    assert missing == []
    assert checks_in(text) <= CHECK_IDS
    assert TEST.search(text) or checks_in(text) or "not here: " in text


def test_no_failure_stands_twice():
    titles = [title for title, _ in ROWS]
    assert len(titles) == len(set(titles)) > 50

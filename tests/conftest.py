"""Fixtures for all tests; a marker that is not fulfilled skips with the reason."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.harness import Jobs, criu_or_reason

pytest_plugins = ["tests.fakegpu.fixtures"] if importlib.util.find_spec("tests.fakegpu.fixtures") else []


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not any(item.get_closest_marker("criu") for item in items):
        return
    path, reason = criu_or_reason()
    if path is None:
        for item in items:
            if item.get_closest_marker("criu"):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture
def jobs():
    """Programs of this test; they end with it."""
    started = Jobs()
    yield started
    started.end()


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """A directory of this test for logs and images."""
    return tmp_path

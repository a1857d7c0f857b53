"""Fixtures for all tests; a marker that is not fulfilled skips with the reason."""

from __future__ import annotations

import fcntl
import importlib.util
import os
import tempfile
from pathlib import Path

import pytest

from tests.harness import Jobs, criu_or_reason

# What the host's administrator has configured is not what is tested.
os.environ["GPUCKPT_CONFIG"] = "/dev/null"

pytest_plugins = [
    name
    for name in ("tests.fakegpu.fixtures", "tests.transferring", "tests.twohosts")
    if importlib.util.find_spec(name)
]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not any(item.get_closest_marker("criu") for item in items):
        return
    path, reason = criu_or_reason()
    if path is None:
        for item in items:
            if item.get_closest_marker("criu"):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item):
    """With several test processes (tests/apart) a test marked `alone` has the host's settings for itself."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return (yield)
    name = f"gpuckpt-tests-{os.environ['PYTEST_XDIST_TESTRUNUID']}"
    with (Path(tempfile.gettempdir()) / name).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX if item.get_closest_marker("alone") else fcntl.LOCK_SH)
        return (yield)


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

"""Fixtures for all tests; a marker that is not fulfilled skips with the reason."""

from __future__ import annotations

import fcntl
import importlib.util
import os
import tempfile
from pathlib import Path

import hypothesis
import pytest

from tests.harness import Jobs, criu_or_reason

# How long an example takes depends on what else the host does.
hypothesis.settings.register_profile("gpuckpt", deadline=None)
hypothesis.settings.load_profile("gpuckpt")

# What the host's administrator has configured is not what is tested.
os.environ["GPUCKPT_CONFIG"] = "/dev/null"

pytest_plugins = [
    name
    for name in ("tests.fakegpu.fixtures", "tests.transferring", "tests.twohosts")
    if importlib.util.find_spec(name)
]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files go first, so that the last of several test processes is not left alone with one of them."""
    items.sort(key=lambda item: item.get_closest_marker("criu") is None)
    if not any(item.get_closest_marker("criu") for item in items):
        return
    path, reason = criu_or_reason()
    if path is None:
        for item in items:
            if item.get_closest_marker("criu"):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item):
    """With several test processes (tests/apart) a test marked `alone` has the host's settings for itself.

    Two locks, because the kernel lets further shared holders pass one who waits for all of it: of three processes two
    kept the third waiting for minutes. Who wants to be alone holds the door while the others finish.
    """
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return (yield)
    name = f"gpuckpt-tests-{os.environ['PYTEST_XDIST_TESTRUNUID']}"
    directory = Path(tempfile.gettempdir())
    kind = fcntl.LOCK_EX if item.get_closest_marker("alone") else fcntl.LOCK_SH
    with (directory / name).open("w") as room:
        with (directory / f"{name}-door").open("w") as door:
            fcntl.flock(door, kind)
            fcntl.flock(room, kind)
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

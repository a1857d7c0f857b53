"""Fixtures for all tests; a marker that is not fulfilled skips with the reason."""

from __future__ import annotations

import fcntl
import importlib.util
import os
import tempfile
from pathlib import Path
from typing import TextIO

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
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None):
    """With several test processes (tests/apart) tests marked `alone` have the host's settings for themselves."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return (yield)
    _HOST.take(alone=_is_alone(item))
    try:
        return (yield)
    finally:
        if not (_is_alone(item) and _is_alone(nextitem)):
            _HOST.give_back()


def _is_alone(item: pytest.Item | None) -> bool:
    return item is not None and item.get_closest_marker("alone") is not None


class _Host:
    """The host's settings, shared by the test processes or held by one, which keeps them for all such tests in a row.

    Two locks, because the kernel lets further shared holders pass one who waits for all of it: of three processes two
    kept the third waiting for minutes. Who wants to be alone holds the door while the others finish.
    """

    def __init__(self) -> None:
        self._room: TextIO | None = None

    def take(self, *, alone: bool) -> None:
        if self._room is not None:
            return
        kind = fcntl.LOCK_EX if alone else fcntl.LOCK_SH
        place = Path(tempfile.gettempdir()) / f"gpuckpt-tests-{os.environ['PYTEST_XDIST_TESTRUNUID']}"
        self._room = place.open("w")
        with place.with_name(f"{place.name}-door").open("w") as door:
            fcntl.flock(door, kind)
            fcntl.flock(self._room, kind)

    def give_back(self) -> None:
        if self._room is not None:
            self._room.close()
            self._room = None


_HOST = _Host()


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

"""Fixtures of the fault tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults import arena


@pytest.fixture(autouse=True)
def subreaper():
    """Orphans become ours while a fault test runs."""
    arena.become_subreaper()
    yield
    arena.become_subreaper(on=False)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A directory that only we can write to, as an image's must be."""
    tmp_path.chmod(0o700)
    return tmp_path


@pytest.fixture
def job(place: Path):
    """The counter of one test."""
    started = arena.Job.start(place)
    yield started
    started.end()

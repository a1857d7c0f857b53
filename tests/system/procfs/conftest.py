"""Fixtures for the tests of procfs."""

from __future__ import annotations

import os

import pytest
from procfs_programs import Programs

from gpuckpt.system import procfs


@pytest.fixture
def programs(tmp_path):
    """Start programs that end with the test."""
    if os.geteuid() != 0:
        pytest.skip("reading the descriptors and mappings of others needs root")
    started = Programs(tmp_path)
    yield started
    started.stop()


@pytest.fixture
def read():
    """Read the tree of a started program."""

    def read_tree(child, **options):
        return procfs.read_tree(procfs.process_id(child.pid), **options)

    return read_tree

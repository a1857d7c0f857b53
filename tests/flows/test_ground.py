"""What was made for a copy of a killed gpuckpt goes; what is in use stays."""

from __future__ import annotations

import fcntl
import os
from types import SimpleNamespace

import pytest

from gpuckpt.flows import ground
from gpuckpt.model.migration import Directory, Link


@pytest.fixture
def terms(tmp_path, monkeypatch):
    monkeypatch.setattr(ground, "INCOMING_PLACE", str(tmp_path / "incoming"))
    place = tmp_path / "job"
    return SimpleNamespace(
        transaction="0" * 32,
        directories=(Directory(str(place), 0o700, os.getuid(), os.getgid(), 0),),
        links=(Link(str(place / "link"), "target", os.getuid(), os.getgid(), 0),),
    )


def records(tmp_path):
    return [path.name for path in (tmp_path / "incoming").iterdir()]


def test_what_a_killed_one_has_made_goes_with_the_next(tmp_path, terms):
    made = ground.Ground()
    made.make(terms)
    ground.tidy()
    assert (tmp_path / "job" / "link").is_symlink(), "its maker lives"
    os.close(made._lock)  # as kill -9 does
    ground.tidy()
    assert not (tmp_path / "job").exists()
    assert records(tmp_path) == []


def test_a_maker_that_ends_while_somebody_tidies_keeps_what_it_has_made(tmp_path, terms, monkeypatch):
    made = ground.Ground()
    made.make(terms)
    real = fcntl.flock

    def flock(descriptor, how):
        made.keep()  # between the tidier's opening of the record and its lock
        real(descriptor, how)

    monkeypatch.setattr(ground.fcntl, "flock", flock)
    ground.tidy()
    assert (tmp_path / "job" / "link").is_symlink()


def test_a_record_that_is_tidied_before_it_is_locked_is_made_again(tmp_path, terms, monkeypatch):
    made, real, calls = ground.Ground(), fcntl.flock, []

    def flock(descriptor, how):
        calls.append(how)
        if len(calls) == 1:
            ground.tidy()
        real(descriptor, how)

    monkeypatch.setattr(ground.fcntl, "flock", flock)
    made.make(terms)
    assert records(tmp_path) == ["0" * 32 + ground.SUFFIX]

"""A dump whose image is complete and whose CRIU died: the tree counts as ended only when all of it has."""

from __future__ import annotations

import subprocess

from gpuckpt.flows import settle
from gpuckpt.owner.messages import Seen


def sleeping(seconds: float) -> subprocess.Popen:
    return subprocess.Popen(["sleep", str(seconds)])


def test_a_rest_that_ends_a_moment_later_has_ended():
    with sleeping(1) as rest:
        assert settle.all_end([Seen(1, "gone", ""), Seen(rest.pid, "running", "")])


def test_a_rest_that_runs_on_has_not(monkeypatch):
    monkeypatch.setattr(settle, "REST_SECONDS", 0.5)
    with sleeping(60) as rest:
        assert not settle.all_end([Seen(1, "gone", ""), Seen(rest.pid, "running", "")])
        rest.kill()


def test_where_nothing_was_seen_nothing_has_ended():
    assert not settle.all_end([])

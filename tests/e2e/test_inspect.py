"""inspect on real images: what memory consists of, how two dumps differ, whether another host could restore."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gpuckpt.images.packindex import read_index
from tests.e2e import rounds
from tests.harness import gpuckpt, wait_for
from tests.sshd import REMOTE_COMMAND

pytestmark = pytest.mark.criu

MB = 1_000_000


@pytest.fixture
def images(jobs, work) -> tuple[Path, Path]:
    """Two dumps of a counter with 20 MB of random memory, which runs on; the second has the first as its base."""
    job = jobs.python("counter.py", work / "log", 20)
    wait_for((work / "log").exists, "it counts")
    rounds.dump(jobs, job.pid, work / "one", "--leave-running")
    seen = len((work / "log").read_text().splitlines())
    wait_for(lambda: len((work / "log").read_text().splitlines()) > seen, "it counts on")
    rounds.dump(jobs, job.pid, work / "two", "--leave-running", "--base", work / "one")
    return work / "one", work / "two"


def screen(*arguments: object) -> str:
    """What a person reads, in a C locale."""
    argv = [sys.executable, "-m", "gpuckpt", "inspect", *map(str, arguments)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120, env={**os.environ, "LC_ALL": "C"})
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.isascii()
    return done.stdout


def test_what_an_image_holds_and_how_it_differs(images):
    one, two = images
    asked = gpuckpt("inspect", two, "--memory", "--diff", one)
    assert asked.status == 0
    data = asked.report["data"]
    kinds = {kind["kind"]: kind for kind in data["memory"]["kinds"]}
    manifest = rounds.manifest(two)
    assert sum(kind["held"] for kind in kinds.values()) == read_index(two / "packs" / "index").raw_bytes()
    packs = sum(part["size"] for part in manifest["parts"] if part["path"].endswith(".zst"))
    assert sum(kind["stored"] for kind in kinds.values()) <= packs
    # Random bytes are stored as they are; of the rest next to nothing is left.
    assert kinds["anonymous"]["stored"] >= 20 * MB > sum(kinds[kind]["stored"] for kind in kinds if kind != "anonymous")
    assert kinds["stacks"]["held"] > 0
    assert {"heap", "files"} <= set(kinds)
    assert [process["pid"] for process in data["memory"]["processes"]] == [manifest["tree"]["root"]["pid"]]

    changes = {change["kind"]: change for change in data["diff"]["memory"]}
    assert all(change["changed"] <= change["held"] == kinds[kind]["held"] for kind, change in changes.items())
    assert sum(change["changed"] for change in changes.values()) < 20 * MB
    named = {(one["group"], one["name"]): one for one in data["diff"]["differences"]}
    log = named["files", str(one.parent / "log")]
    assert log["other"] != log["here"]
    assert not [group for group, _ in named if group in ("versions", "GPUs", "environment")]

    shown = screen(two, "--memory")
    assert "Picture  a block is " in shown
    assert "####" in shown
    assert "-> " in screen(two, "--diff", one)
    same = gpuckpt("inspect", one, "--diff", one).report["data"]["diff"]
    assert same["differences"] == []
    assert all(change["changed"] == 0 for change in same["memory"])


def test_another_host_judges_an_image_with_its_own_facts(images, sshd, jobs):
    """The other host is this one: the pids of the job, which runs on, are taken there too."""
    one, two = images
    against = ("--against", "far:", "--ssh-config", sshd.config, "--remote-command", REMOTE_COMMAND)
    asked = gpuckpt("inspect", one, *against)
    assert asked.status == 20, asked.stderr
    assert "pids-free" in asked.finding_ids
    assert (asked.report["outcome"], asked.report["process"]) == ("refused", "untouched")
    assert asked.report["data"]["against"] == "far:"
    assert asked.report["data"]["restorable"] == "no"
    here = gpuckpt("inspect", one)
    assert here.status == 0
    known = {finding["id"]: finding["verdict"] for finding in asked.report["findings"]}
    assert {finding["id"] for finding in here.report["findings"]} - {"image-safe", "files-captured"} <= set(known)

    pid = rounds.manifest(one)["tree"]["root"]["pid"]
    os.kill(pid, 9)
    rounds.await_end(jobs, [pid])
    asked = gpuckpt("inspect", two, *against)
    assert asked.finding_ids.isdisjoint({"pids-free", "original"}), asked.report["findings"]
    bare = gpuckpt("inspect", one, "--against", "bare:", "--ssh-config", sshd.config)
    assert bare.status == 10

"""What a person names by mistake, or without need: said in words, before anything is touched."""

import os

import pytest

from tests.harness import alive, gpuckpt


@pytest.mark.parametrize(
    ("option", "name", "words"),
    [
        ("--stdout", "no/such/log", "there is no directory"),
        ("--stderr", ".", "it is a directory"),
        ("--stdin", "missing", "there is no such file"),
    ],
)
@pytest.mark.parametrize("wait", [(), ("--wait",)], ids=["", "wait"])
def test_a_place_for_a_stream_that_is_not_there(work, option, name, words, wait):
    answer = gpuckpt("restore", work / "img", option, work / name, *wait)
    assert (answer.status, answer.error["code"]) == (21, "not-found")
    assert words in answer.error["message"]
    assert str(work) in answer.error["message"]
    assert answer.error["hint"]


@pytest.mark.parametrize(
    "command", [["dump", "img", "--tree", 1], ["inspect", "--tree", 1], ["restore", "--tree", 1]], ids=lambda c: c[0]
)
def test_init_is_nobodys_job(command):
    answer = gpuckpt(*command)
    assert answer.status == 20
    assert "is init" in answer.error["message"]
    assert answer.error["hint"] == "name a process of your own"


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_a_tree_that_runs_needs_no_repair(jobs):
    job = jobs.start("/bin/sleep", "1000")
    answer = gpuckpt("restore", "--tree", job.pid)
    assert (answer.status, answer.report["process"]) == (0, "running")
    assert answer.report["data"]["duty"] == "nothing"
    assert alive(job.pid)

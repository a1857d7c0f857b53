"""Listeners: they never raise into a flow and never hold it up."""

import io
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from gpuckpt.cli import listening as module
from gpuckpt.cli.listening import Relay, listening
from gpuckpt.cli.manner import Manner
from gpuckpt.model.report import Event

EVENTS = [
    Event("lock", "begin"),
    Event("lock", "note", "waits for 4243\x1b[2J"),
    Event("lock", "end", seconds=0.3),
    Event("capture", "begin", total_bytes=100),
    Event("capture", "progress", done_bytes=50, total_bytes=100),
    Event("capture", "progress", done_bytes=70),
    Event("capture", "end", seconds=1.0),
    Event("something-new", "end"),
]


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def test_events_arrive_in_order():
    seen = []
    relay = Relay(seen.append)
    for event in EVENTS:
        relay.hear(event)
    relay.close()
    assert seen == EVENTS


def test_a_stuck_reader_does_not_hold_the_flow(monkeypatch):
    monkeypatch.setattr(module, "PATIENCE_SECONDS", 0.1)
    stuck = threading.Event()
    relay = Relay(lambda _event: stuck.wait(20))
    begun = time.monotonic()
    for event in EVENTS:
        relay.hear(event)
    relay.close()
    assert time.monotonic() - begun < 5
    stuck.set()


def test_a_listener_that_fails_is_no_failure():
    def broken(_event):
        raise OSError(5, "the terminal is gone")

    relay = Relay(broken)
    for event in EVENTS:
        relay.hear(event)
    relay.close()


def test_nothing_is_drawn_over_a_job_that_shares_the_terminal(monkeypatch):
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    with listening(Manner(shares_terminal=True)) as listener:
        for event in EVENTS:
            listener(event)
    assert stream.getvalue() == ""


@pytest.mark.parametrize("manner", [Manner(), Manner(quiet=True)])
def test_nothing_is_said_without_a_terminal(manner, capsys):
    with listening(manner) as listener:
        for event in EVENTS:
            listener(event)
    assert capsys.readouterr() == ("", "")


def test_verbose_lines(capsys):
    with listening(Manner(verbose=True)) as listener:
        for event in EVENTS:
            listener(event)
    assert capsys.readouterr().err.splitlines() == [
        "gpuckpt: lock",
        r"gpuckpt: lock: waits for 4243\x1b[2J",
        "gpuckpt: lock done 0.30 s",
        "gpuckpt: capture",
        "gpuckpt: capture done 1.00 s",
        "gpuckpt: something-new done",
    ]


def test_progress_on_a_terminal(monkeypatch):
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("TERM", "xterm")
    with listening(Manner()) as listener:
        for event in EVENTS:
            listener(event)
    text = stream.getvalue()
    assert "capture" in text
    assert "gpuckpt: waits for 4243" in text
    assert "\x1b[2Jx" not in text
    assert text.rstrip().endswith(("\x1b[2K", "\x1b[?25h", "\x1b[1A\x1b[2K"))


def test_a_dump_ends_although_nobody_reads_its_events():
    """stderr is a pipe that fills up and is never read."""
    code = """
import sys
from gpuckpt.cli.listening import listening
from gpuckpt.cli.manner import Manner
from gpuckpt.model.report import Event
with listening(Manner(json=True)) as listener:
    for n in range(5000):
        listener(Event("capture", "progress", "x" * 100, done_bytes=n))
print("done", flush=True)
"""
    read, write = os.pipe()
    root = str(Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=write,
        timeout=30,
        check=True,
        env={"PYTHONPATH": root},
    )
    os.close(write)
    os.close(read)
    assert done.stdout == b"done\n"

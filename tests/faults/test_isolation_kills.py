"""kill -9 in a restore into namespaces: a whole tree that serves, or nothing: no process, no mount, no run.

Each round kills somebody at one moment of the restore of a clone beside the original, which serves on.
"""

from __future__ import annotations

import json
import os
import signal
from contextlib import suppress

import pytest

from tests import cloning, harness
from tests.cloning import ask, free_port, serves
from tests.faults import arena
from tests.faults.arena import SETTLE, Shot
from tests.harness import gpuckpt

pytestmark = [pytest.mark.criu, pytest.mark.timeout(600)]

JOURNAL, LOG = "journal", "criu.log"
NAMESPACE, HELD, LET_GO = (JOURNAL, '"namespace"'), (JOURNAL, '"held"'), (JOURNAL, '"let-go"')
FORKING, NEARLY = (LOG, "Forking task with"), (LOG, "Restored")

BLOWS = [
    (NAMESPACE, "owner"),
    (NAMESPACE, "init"),
    (FORKING, "criu"),
    (FORKING, "main owner criu"),
    (NEARLY, "main owner"),
    (HELD, "main"),
    (HELD, "owner"),
    (HELD, "init"),
    (LET_GO, "main"),
    (LET_GO, "owner"),
]


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    """The original, which serves on all the time, its port, and its image: large enough that memory is injected."""
    jobs = harness.Jobs()
    place = tmp_path_factory.mktemp("kills")
    port = free_port()
    root = cloning.start(jobs, port, megabytes=48)
    answer = gpuckpt("dump", "--tree", root, place / "img", "--leave-running", *SETTLE)
    assert answer.status == 0, answer
    yield port, place / "img"
    assert ask(port)["pid"] == root
    jobs.end()


def seen(shot: Shot, mark: tuple[str, str]) -> bool:
    file, words = mark
    run = arena.run_of_main(shot.main.pid)
    with suppress(OSError):
        return run is not None and words in (run / file).read_text("utf-8", "replace")
    return False


def init_of(shot: Shot) -> int | None:
    """Process 1 of the namespace that this restore has made."""
    run = arena.run_of_main(shot.main.pid)
    with suppress(OSError):
        for line in (run / JOURNAL).read_text().split("\n") if run else ():
            if '"namespace"' in line:
                return json.loads(line.strip("\0"))["pid"]
    return None


def people(shot: Shot) -> dict[str, int | None]:
    """Whom one can kill."""
    init = init_of(shot)
    children = arena.children(init) if init else []
    criu = next((pid for pid in children if "--action-script" in arena.command_of(pid)), None)
    return {"main": shot.main.pid, "owner": arena.owner_of(shot.main.pid), "init": init, "criu": criu}


@pytest.mark.parametrize(
    ("mark", "who"), BLOWS, ids=lambda value: value.replace(" ", "+") if isinstance(value, str) else value[1].strip('"')
)
def test_killed(engine, mark, who):
    original, image = engine
    port = free_port()
    mounts = cloning.mounts(os.getpid())
    # With --wait the owner stays when the tree is whole, and can be killed.
    wait = ["--wait"] if mark == LET_GO else []
    shot = Shot("restore", image, "--clone", "--port", f"{original}={port}", *SETTLE, *wait)
    assert shot.until(lambda: seen(shot, mark)), shot.answer()
    found = people(shot)
    init = found["init"]
    assert init is not None
    hit = {name: arena.kill(found[name]) for name in reversed(who.split())}
    assert any(hit.values())
    answer = shot.answer()
    whole = comes_to_rest(init, port)
    print(
        f"\n{who} at {mark[1]}: killed {[name for name, was in hit.items() if was]}, the tree is {'whole' if whole else 'gone'}"
    )
    if answer is not None:
        said = (answer.status, answer.report["process"])
        assert said in ([(0, "restored"), (41, "restored")] if whole else [(40, "untouched"), (41, "gone")]), (
            said,
            answer.error,
        )
    if whole:
        assert ask(port)["count"] == ask(port)["count"] - 1, "it serves"
        os.kill(root_of(init), signal.SIGKILL)
        harness.wait_for(lambda: not harness.alive(init), "the namespace ends with its root")
    assert not cloning.inside(init)
    assert cloning.mounts(os.getpid()) == mounts
    assert not serves(port)

    def put_away() -> bool:
        """What was left in /run goes with the next run that comes along once its CRIU has ended, at the latest."""
        if arena.run_of_main(shot.main.pid):
            gpuckpt("restore", image, "--isolate", "net", *SETTLE)
        return arena.run_of_main(shot.main.pid) is None

    harness.wait_for(put_away, "what was left in /run is put away")


def comes_to_rest(init: int, port: int) -> bool:
    """Once owner and CRIU have ended: whether the tree is whole; what is neither whole nor gone fails."""

    def settled() -> str:
        if not cloning.inside(init):
            return "gone"
        busy = any("--action-script" in arena.command_of(pid) for pid in arena.children(init))
        return "whole" if not busy and serves(port) else ""

    return harness.wait_for(settled, "a whole tree, or none") == "whole"


def root_of(init: int) -> int:
    return next(pid for pid in arena.children(init) if "server.py" in arena.command_of(pid))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_broken_off(engine, number):
    """Ctrl-C while the tree is held: nothing is left, and the exit status says so."""
    original, image = engine
    shot = Shot("restore", image, "--clone", "--port", f"{original}={free_port()}", *SETTLE)
    assert shot.until(lambda: seen(shot, HELD)), shot.answer()
    init = init_of(shot)
    shot.main.send_signal(number)
    answer = shot.answer()
    assert (answer.status, answer.report["process"]) == (128 + number, "untouched"), answer
    assert not cloning.inside(init)
    assert arena.run_of_main(shot.main.pid) is None

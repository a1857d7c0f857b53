"""A tree that comes back where its pids, its ports or its very image are in use by others."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import threading
from pathlib import Path

import pytest

from tests import cloning, harness
from tests.cloning import ask, free_port, serves
from tests.e2e import rounds, starting
from tests.harness import gpuckpt

pytestmark = pytest.mark.criu


@pytest.fixture
def shared_name():
    """A file in /dev/shm, gone afterwards."""
    name = f"gpuckpt-test-{os.getpid()}"
    yield name
    Path("/dev/shm", name).unlink(missing_ok=True)


@pytest.fixture
def network():
    """A network namespace as an operator prepares it, and its address."""
    name = f"gptest{os.getpid()}"
    for words in (
        f"netns add {name}",
        f"link add {name}h type veth peer name {name}c netns {name}",
        f"addr add 10.98.7.1/24 dev {name}h",
        f"link set {name}h up",
        f"-n {name} addr add 10.98.7.2/24 dev {name}c",
        f"-n {name} link set {name}c up",
    ):
        subprocess.run(["ip", *words.split()], check=True, timeout=60)
    yield name, "10.98.7.2"
    subprocess.run(["ip", "netns", "del", name], check=True, timeout=60)


def clone(jobs, image, *options):
    """A clone that must come up; it ends with the test."""
    told = image.parent / f"told{'-'.join(options)}"
    answer = rounds.restore(
        jobs, image, "--clone", *options, "--post-restore", f"echo $GPUCKPT_PID $GPUCKPT_CLONE_ID >{told}"
    )
    data = answer.report["data"]
    jobs.adopt(data["init_pid"])
    assert told.read_text().split() == [str(data["root_pid"]), data["clone_id"]]
    return data


def end(data) -> None:
    """End a tree by its root: all of its namespace goes with it."""
    everything = cloning.inside(data["init_pid"])
    assert {data["init_pid"], *data["pids"]} <= everything
    os.kill(data["root_pid"], signal.SIGKILL)
    harness.wait_for(lambda: not any(map(harness.alive, everything)), "nothing of the namespace is left")


def test_three_clones_serve_beside_the_original(work, jobs, shared_name, network):
    """Two ports of this host, one network of its own; each goes on by itself, from the very same moment."""
    name, address = network
    port, *others = free_port(), free_port(), free_port()
    original = cloning.start(jobs, port, shared_name, 40)
    rounds.dump(jobs, original, work / "img", "--leave-running")
    at_dump = ask(port)["count"] - 1
    ways = [("--port", f"{port}={others[0]}"), ("--port", f"{port}={others[1]}"), ("--netns", name)]
    clones: dict[int, dict] = {}
    # At once: they read the same image, and each has files of CRIU's making under the same names.
    threads = [
        threading.Thread(target=lambda n=number, way=way: clones.update({n: clone(jobs, work / "img", *way)}))
        for number, way in enumerate(ways)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(clones) == [0, 1, 2]
    places = [(others[0], "127.0.0.1"), (others[1], "127.0.0.1"), (port, address)]
    for further in (1, 2):
        for place in places:
            said = ask(*place)
            # Its own memory, semaphore and /dev/shm: nobody else's requests count; its pid is what it was.
            assert (said["count"], said["pid"]) == (at_dump + further, original)
    assert ask(port)["count"] == at_dump + 2, "the original has its own"
    assert len({data["clone_id"] for data in clones.values()}) == 3
    in_the_image = [one["id"]["pid"] for one in rounds.manifest(work / "img")["tree"]["processes"]]
    for number, data in sorted(clones.items()):
        assert data["namespace_pids"] == in_the_image
        assert str(work) not in cloning.mounts(data["init_pid"]), "the image's file system is not kept busy"
        end(data)
        left = [place for later, place in enumerate(places) if later > number]
        assert all(ask(*place)["count"] for place in left)
    assert ask(port)["count"] == at_dump + 3
    why = clone_without_room(work / "img")
    assert "/dev/shm: No space left on device" in why
    assert not list(Path("/run/gpuckpt/runs").iterdir())


def clone_without_room(image) -> str:
    """Where /dev/shm has room for one page, and so a clone's own: why it fails."""
    small = 'mount -t tmpfs -o size=4k tmpfs /dev/shm; exec "$@"'
    argv = ["unshare", "--mount", "--propagation", "private", "sh", "-c", small, "sh", *starting.GPUCKPT]
    argv += ["restore", str(image), "--clone", "--netns", "new", "--json"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120)
    report = json.loads(done.stdout)
    assert (done.returncode, report["process"]) == (40, "untouched"), report
    return report["error"]["message"]


def test_what_is_taken_here_names_the_way_out(work, jobs):
    port = free_port()
    original = cloning.start(jobs, port)
    rounds.dump(jobs, original, work / "img", "--leave-running")
    plain = gpuckpt("restore", work / "img", "--dry-run")
    hints = {finding["id"]: finding["hint"] for finding in plain.report["findings"] if finding["verdict"] == "fail"}
    assert "--isolate pid" in hints["pids-free"]
    assert "--isolate net" in hints["ports-free"]
    assert rounds.refused(gpuckpt("restore", work / "img", "--isolate", "pid")) == {"ports-free"}
    assert rounds.refused(gpuckpt("restore", work / "img", "--isolate", "net")) == {"pids-free"}
    both = rounds.restore(jobs, work / "img", "--isolate", "pid,net").report["data"]
    jobs.adopt(both["init_pid"])
    assert both["root_pid"] != original
    assert (both["namespace_pids"], both["netns"]) == ([original], "new")
    assert ask(port, pid=both["root_pid"])["pid"] == original
    assert _command(both["init_pid"]).rstrip(b"\0") == f"gpuckpt: init of {work / 'img'}".encode()
    assert Path(f"/proc/{both['init_pid']}/comm").read_text() == "gpuckpt-init\n"
    again = gpuckpt("dump", "--tree", both["root_pid"], work / "again")
    assert "`gpuckpt restore` has made" in again.error["message"]
    assert "container" in rounds.refused(again), "a tree in namespaces of its own is not dumped from outside"
    end(both)


def test_a_network_of_its_own_where_only_the_ports_are_taken(work, jobs):
    port = free_port()
    original = cloning.start(jobs, port, megabytes=40)
    rounds.dump(jobs, original, work / "img")
    stranger = cloning.start(jobs, port)
    assert rounds.refused(gpuckpt("restore", work / "img")) == {"ports-free"}
    rounds.restore(jobs, work / "img", "--isolate", "net")
    assert ask(port, pid=original)["count"] == 2
    assert ask(port)["pid"] == stranger


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 7), (signal.SIGKILL, 137)])
def test_wait_stands_for_a_job_with_pids_of_its_own(work, jobs, number, status):
    port = free_port()
    original = cloning.start(jobs, port, megabytes=40)
    rounds.dump(jobs, original, work / "img")
    waiting = jobs.start(*starting.GPUCKPT, "restore", work / "img", "--wait", "--isolate", "pid")
    harness.wait_for(lambda: serves(port), "the job is back")
    inner = [pid for pid in rounds.descendants(waiting.pid) if b"server.py" in _command(pid)]
    if number == signal.SIGKILL:
        os.kill(inner[-1], number)
    else:
        waiting.send_signal(number)
    assert waiting.wait(60) == status


def _command(pid: int) -> bytes:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"--images-dir")[0]
    return b""


def test_the_gpu_comes_back_from_outside(work, fake_gpu, start_fake_cuda_app):
    """The driver is asked by the pids and tids of this host, which are not those of the image."""
    fake_gpu.configure(total=8 << 30)
    app = start_fake_cuda_app("--mib", "16")
    app.wait_for_steps(3)
    dumped = gpuckpt("dump", "--tree", app.pid, work / "img", env=fake_gpu.variables)
    assert dumped.status == 0, dumped
    app.process.wait(10)
    steps, counts = app.steps(), app.thread_counts()
    restored = gpuckpt("restore", work / "img", "--settle", 0.3, "--isolate", "pid", env=fake_gpu.variables)
    assert (restored.status, restored.report["process"]) == (0, "restored"), restored
    data = restored.report["data"]
    try:
        assert data["root_pid"] != app.pid
        app.wait_for_steps(3)
        seen = app.steps()
        assert seen[: len(steps)] == steps
        assert seen == list(range(1, len(seen) + 1))
        assert app.thread_counts()[: len(counts)] == counts
    finally:
        end(data)

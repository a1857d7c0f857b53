"""Images on their way between two hosts, each with its own processes, files and network; the link is real."""

from __future__ import annotations

import json

import pytest

from tests.e2e.rounds import SETTLE, explain, goes_on
from tests.harness import numbers, wait_for, wait_for_count
from tests.small_images import content_of, make_image

MIB = 1 << 20


def counting(host, megabytes=20) -> int:
    """A program on a host that counts into its /srv/log; returns its pid there."""
    pid = host.python("counter.py", "/srv/log", megabytes)
    wait_for_count(host.outside("/srv/log"), 3)
    return pid


def done(answer):
    """It must have worked; returns its data."""
    assert answer.status == 0, explain(answer)
    return answer.report["data"]


def goes_on_there(two_hosts, pid) -> None:
    """The program of a goes on on b: its log from where it was, its memory as it was."""
    log, seen = two_hosts.b.outside("/srv/log"), numbers(two_hosts.a.outside("/srv/log"))[-1]
    two_hosts.b.run("kill", "-USR1", pid)
    goes_on(log, seen)
    wait_for(lambda: "XSUM" in log.read_text(), "it has looked at its memory")


def take_log_along(two_hosts) -> None:
    two_hosts.b.outside("/srv/log").write_bytes(two_hosts.a.outside("/srv/log").read_bytes())


@pytest.mark.criu
def test_a_program_goes_on_on_the_other_host(two_hosts):
    """Its image pushed; restored from where it lies; and pulled."""
    a, b, reach = two_hosts.a, two_hosts.b, two_hosts.reach
    print(a.worsen_link())
    pid = counting(a, 60)
    done(a.gpuckpt("dump", "--tree", pid, "/srv/image", *SETTLE))
    assert not a.alive(pid)

    done(a.gpuckpt("push", "/srv/image", "b:/srv/pushed", *reach))
    take_log_along(two_hosts)
    done(b.gpuckpt("restore", "/srv/pushed/image", *SETTLE))
    goes_on_there(two_hosts, pid)

    b.run("kill", "-KILL", pid)
    wait_for(lambda: not b.alive(pid), "it ends")
    take_log_along(two_hosts)
    data = done(b.gpuckpt("restore", "a:/srv/image", *reach, *SETTLE))
    assert data["bytes_injected"] > 40 * MIB
    goes_on_there(two_hosts, pid)

    done(b.gpuckpt("pull", "a:/srv/image", "/srv/pulled", *reach))
    assert content_of(b.outside("/srv/pulled/image")) == content_of(a.outside("/srv/image"))


@pytest.fixture
def image(two_hosts):
    """An image on a; nobody can restore it."""
    return make_image(two_hosts.a.outside("/srv/image"), 28, seed=3)


def start_push(jobs, two_hosts, target="/srv"):
    push = ("push", "/srv/image", f"b:{target}", *two_hosts.reach)
    return jobs.own(two_hosts.a.start_gpuckpt(*push, "--bwlimit", "8M", "--connections", 2))


def arrived(two_hosts, target="/srv") -> int:
    """Whole pieces that b has noted."""
    journal = two_hosts.b.outside(f"{target}/image.partial/journal")
    return journal.stat().st_size // 36 if journal.exists() else 0


def assert_done(two_hosts, running) -> None:
    out, err = running.communicate(timeout=200)
    assert running.returncode == 0, out + err
    assert content_of(two_hosts.b.outside("/srv/image")) == content_of(two_hosts.a.outside("/srv/image"))


def test_a_link_that_is_down_for_a_while(jobs, two_hosts, image):
    running = start_push(jobs, two_hosts)
    wait_for(lambda: arrived(two_hosts) >= 8, "pieces arrive")
    two_hosts.a.link("down")
    before = arrived(two_hosts)
    two_hosts.a.run("sleep", "2")
    assert arrived(two_hosts) <= before + 2, "the link was not down"
    two_hosts.a.link("up")
    assert_done(two_hosts, running)


def test_an_sshd_that_is_killed_and_comes_back(jobs, two_hosts, image):
    running = start_push(jobs, two_hosts)
    wait_for(lambda: arrived(two_hosts) >= 8, "pieces arrive")
    two_hosts.b.kill_sshd()
    assert any("cannot be reached" in event for event in running.stderr), "it did not try again"
    two_hosts.b.begin()
    assert_done(two_hosts, running)


def test_a_disk_that_is_full_there(jobs, two_hosts, image):
    b = two_hosts.b
    b.run("mkdir", "/srv/disk")
    b.run("mount", "-t", "tmpfs", "-o", "size=64m,mode=700", "tmpfs", "/srv/disk")
    running = start_push(jobs, two_hosts, "/srv/disk")
    wait_for(lambda: arrived(two_hosts, "/srv/disk") >= 8, "pieces arrive")
    b.run("sh", "-c", "cat /dev/zero > /srv/disk/filler", check=False)
    out, _ = running.communicate(timeout=100)
    assert running.returncode == 50, out
    assert "full" in json.loads(out)["error"]["message"]
    b.run("rm", "/srv/disk/filler")
    data = done(two_hosts.a.gpuckpt("push", "/srv/image", "b:/srv/disk", *two_hosts.reach))
    assert data["bytes_skipped"] > 4 * MIB
    assert content_of(b.outside("/srv/disk/image")) == content_of(image)

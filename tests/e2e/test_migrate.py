"""migrate: a job goes on on the other host, with what it had open; what cannot work is refused before it stands still."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.rounds import SETTLE, explain, goes_on
from tests.fakegpu.fixtures import FakeGpu
from tests.harness import PROGRAMS, Answer, numbers, wait_for, wait_for_count
from tests.sshd import REMOTE_COMMAND
from tests.twohosts import Host, TwoHosts

pytestmark = [pytest.mark.criu, pytest.mark.timeout(600)]

LOG = "/srv/log"


def migrate(hosts: TwoHosts, pid: int, *options: object, to: str = "b", reach: tuple = ()) -> Answer:
    """From a to b."""
    return hosts.a.gpuckpt("migrate", "--tree", pid, to, *(reach or hosts.reach), *SETTLE, *options, timeout=240)


def moved(hosts: TwoHosts, pid: int, *options: object, to: str = "b", log: str = LOG) -> Answer:
    """A migration that must work: the job counts on there, without a gap, and is gone here."""
    answer = migrate(hosts, pid, *options, to=to)
    assert (answer.status, answer.report["outcome"], answer.report["process"]) == (0, "ok", "restored"), explain(answer)
    assert not hosts.a.alive(pid)
    goes_on(hosts.b.outside(log), numbers(hosts.a.outside(log))[-1])
    assert hosts.b.alive(pid)
    owners = [one["job_is_on"] for one in map(_event, answer.stderr.splitlines()) if "job_is_on" in one]
    assert owners == ["a", "unknown", "b"]
    return answer


def _event(line: str) -> dict:
    return json.loads(line) if line.startswith("{") else {}


def assert_untouched(hosts: TwoHosts, pid: int) -> None:
    """The job counts on here; nothing of it, and of its image, is there."""
    before = numbers(hosts.a.outside(LOG))[-1]
    wait_for_count(hosts.a.outside(LOG), before + 3)
    assert hosts.a.alive(pid)
    left = hosts.b.run("sh", "-c", "ls -d /srv/images/* /run/gpuckpt/runs/* 2>/dev/null", check=False).stdout
    assert left == ""


def refused(answer: Answer) -> str:
    """The checks that refuse, in one text; each says of which host it speaks."""
    assert (answer.status, answer.report["process"]) == (20, "untouched"), explain(answer)
    blocks = [one for one in answer.report["findings"] if one["verdict"] == "fail" and one["severity"] == "block"]
    assert all(one["found"].startswith("on b: ") for one in blocks), blocks
    return " ".join(one["id"] for one in blocks)


def test_a_tree_moves_with_pipes_and_connections_between_its_processes(two_hosts):
    a, b = two_hosts.a, two_hosts.b
    a.worsen_link()
    b.worsen_link()
    pid = a.python("kinds.py", "ring", LOG)
    wait_for_count(a.outside(LOG), 3)
    answer = moved(two_hosts, pid)
    data = answer.report["data"]
    assert len(data["pids"]) == 4
    assert 0 < data["downtime_seconds"] <= data["frozen_seconds"]
    assert data["location"] is None and data["image"] is None
    assert (
        b.run("sh", "-c", "ls /var/lib/gpuckpt/incoming | grep -- -$0- || true", pid).stdout.count(data["image_id"][:8])
        == 0
    )
    # And back again, the other way round: it is a job like any other.
    home = b.gpuckpt("migrate", "--tree", pid, "a", *two_hosts.reach, *SETTLE)
    assert home.status == 0, explain(home)
    goes_on(a.outside(LOG), numbers(b.outside(LOG))[-1])


def test_a_server_moves_with_its_port_its_files_and_its_memory(two_hosts):
    a, b = two_hosts.a, two_hosts.b
    for name in ("app", "app/deep"):
        a.outside(f"/srv/{name}").mkdir(mode=0o750)
    pid = a.daemon(
        "env", "--chdir=/srv/app/deep", sys.executable, PROGRAMS / "caller.py", "/srv/app/log", "-", "-", 4711
    )
    wait_for_count(a.outside("/srv/app/log"), 3)
    answer = moved(
        two_hosts,
        pid,
        "--keep-image",
        "/srv/kept",
        "--ready-tcp",
        "127.0.0.1:4711",
        to="b:/srv/images",
        log="/srv/app/log",
    )
    assert b.run(sys.executable, "-c", ASK).stdout == "olleh\n"
    assert a.run(sys.executable, "-c", ASK, check=False).returncode != 0
    assert b.outside("/srv/app/deep").stat().st_mode & 0o777 == 0o750
    data = answer.report["data"]
    assert data["location"] == f"b:/srv/images/a-{pid}-{data['image_id'][:8]}"
    for host, image in ((a, "/srv/kept"), (b, data["location"].partition(":")[2])):
        looked = host.gpuckpt("inspect", image, "--verify")
        assert looked.report["data"]["verified"] is True
        assert looked.report["data"]["manifest"]["image_id"] == data["image_id"]


ASK = """
import socket
with socket.create_connection(("127.0.0.1", 4711), 30) as caller:
    caller.sendall(b"hello")
    print(caller.recv(100).decode())
"""


def test_a_port_that_is_taken_there_is_refused_unless_a_command_of_the_user_frees_it(two_hosts):
    a, b = two_hosts.a, two_hosts.b
    pid = a.python("caller.py", LOG, "-", "-", 4711)
    a.outside("/srv/job.pid").write_text(f"{pid}\n")
    wait_for_count(a.outside(LOG), 3)
    other = b.daemon(sys.executable, "-c", LISTEN)
    wait_for(lambda: b.run(sys.executable, "-c", KNOCK, check=False).returncode == 0, "somebody listens there")
    answer = migrate(two_hosts, pid)
    assert refused(answer) == "ports-free"
    assert "tcp 127.0.0.1:4711" in answer.error["message"] and f"by {other} " in answer.error["message"]

    def told(number: int) -> str:
        return f"env > /srv/told-{number}"

    after = ("--post-dump", told(2), "--post-restore", told(4))
    reach = (*two_hosts.reach, *SETTLE, "b")
    answer = a.gpuckpt("migrate", "--pid-file", "/srv/job.pid", *reach, "--pre-dump", "exit 7", *after)
    assert (answer.status, answer.report["process"]) == (20, "untouched"), explain(answer)
    assert {"GPUCKPT_OUTCOME=refused"} <= variables(a, 2) and not b.outside("/srv/told-4").exists()
    # The last commands run on the host that they are about, and know how it went there.
    free = f"{told(3)}; kill -KILL {other}"
    figures = ("--metrics-file", "/srv/job.prom")
    before = ("--pre-dump", told(1), "--pre-restore", free)
    answer = a.gpuckpt("migrate", "--pid-file", "/srv/job.pid", *reach, *before, *after, *figures)
    assert (answer.status, answer.report["process"]) == (0, "restored"), explain(answer)
    goes_on(b.outside(LOG), numbers(a.outside(LOG))[-1])
    assert b.run(sys.executable, "-c", ASK).stdout == "olleh\n"
    assert {f"GPUCKPT_PID={pid}", "GPUCKPT_HOST=a", "GPUCKPT_PHASE=pre-dump"} <= variables(a, 1)
    assert {"GPUCKPT_OUTCOME=ok", "GPUCKPT_PROCESS=ended", "GPUCKPT_PHASE=post-dump"} <= variables(a, 2)
    assert {"GPUCKPT_HOST=b", "GPUCKPT_PHASE=pre-restore"} <= variables(b, 3)
    assert {"GPUCKPT_OUTCOME=ok", "GPUCKPT_PROCESS=restored", "GPUCKPT_PHASE=post-restore"} <= variables(b, 4)
    assert {"pre_dump", "post_dump", "pre_restore", "post_restore"} <= set(answer.report["data"]["seconds"])
    written = a.outside("/srv/job.prom").read_text()
    assert 'gpuckpt_last_run_exit_status{command="migrate",name="job"} 0' in written


def variables(host: Host, number: int) -> set[str]:
    """What a command of the user was told."""
    return set(host.outside(f"/srv/told-{number}").read_text().splitlines())


LISTEN = "import socket, time; one = socket.create_server(('127.0.0.1', 4711)); time.sleep(1000)"
KNOCK = "import socket; socket.create_connection(('127.0.0.1', 4711))"


def test_connections_that_leave_the_tree_are_kept_with_their_address_or_closed(two_hosts):
    a, b = two_hosts.a, two_hosts.b
    begin_far_end(two_hosts, ECHO)
    pid = a.python("caller.py", LOG, "10.99.0.20", 4712)
    wait_for_count(a.outside(LOG), 3)
    answer = migrate(two_hosts, pid)
    assert answer.status == 20 and "10.99.0.20:4712" in answer.error["message"], explain(answer)
    assert "--tcp keep" in answer.error["hint"]
    assert refused(migrate(two_hosts, pid, "--tcp", "keep")) == "addresses"

    hooks = {"--pre-dump": f"ip address del {MOVING}", "--pre-restore": f"ip address add {MOVING}"}
    answer = moved(two_hosts, pid, "--tcp", "keep", *(word for hook in hooks.items() for word in hook))
    assert says(answer, "tcp-outside").count("10.99.0.20:4712") == 1
    assert "OUTSIDE" not in b.outside(LOG).read_text()

    a.outside(LOG).unlink()
    home = b.gpuckpt("migrate", "--tree", pid, "a", *two_hosts.reach, *SETTLE, "--tcp", "close")
    assert home.status == 0, explain(home)
    assert "--tcp close" in says(home, "tcp-outside")
    wait_for(lambda: "OUTSIDE" in a.outside(LOG).read_text(), "the job sees the end")
    goes_on(a.outside(LOG), numbers(b.outside(LOG))[-1])


MOVING = "10.99.0.7/24 dev eth0"
"""An address that moves with the job."""


def begin_far_end(hosts: TwoHosts, program: str) -> None:
    """At an address that stays where it is; what a says to it comes from the one that moves."""
    hosts.b.run("ip", "address", "add", "10.99.0.20/24", "dev", "eth0")
    hosts.a.run("ip", "address", "add", *MOVING.split())
    hosts.a.run("ip", "route", "add", "10.99.0.20/32", "dev", "eth0", "src", "10.99.0.7")
    hosts.b.daemon(sys.executable, "-c", program)
    wait_for(hosts.b.outside("/srv/listens").exists, "the far end listens")


def tables(host: Host) -> list[str]:
    """The nftables tables of gpuckpt's there."""
    listing = "from gpuckpt.system import netfilter; print(*(one.name for one in netfilter.list_tables()))"
    said = host.run("env", f"PYTHONPATH={PROGRAMS.parents[1]}", sys.executable, "-c", listing).stdout
    return [name for name in said.split() if name.startswith("gpuckpt")]


def test_a_kept_connection_lives_on_whose_far_end_never_stops_talking(two_hosts):
    """From the moment when the address is there, to the one when the copy is, it would be answered with a reset."""
    a, b = two_hosts.a, two_hosts.b
    begin_far_end(two_hosts, TALK)
    pid = a.python("hearer.py", LOG, "10.99.0.20", 4712)
    wait_for_count(a.outside(LOG), 100)
    hooks = ("--pre-dump", f"ip address del {MOVING}", "--tcp", "keep", "--pre-restore")
    hold = f"ip address add {MOVING}; touch /srv/moved; sleep 300"

    # Both gpuckpts there are killed when the address has come: nothing runs there that could open the way again.
    main = a.start_gpuckpt(*("migrate", "--tree", pid, "b", *two_hosts.reach, *SETTLE), *hooks, hold)
    wait_for(b.outside("/srv/moved").exists, "the address is there")
    assert len(tables(b)) == 1
    for number in (*b.serving(), *owners(b)):
        os.kill(number, signal.SIGKILL)
    said, errors = main.communicate(timeout=200)
    assert json.loads(said)["process"] == "running", (said, errors)
    assert len(tables(b)) == 1
    b.run("ip", "address", "del", *MOVING.split())
    a.run("ip", "address", "add", *MOVING.split())
    wait_for_count(a.outside(LOG), numbers(a.outside(LOG))[-1] + 100)

    moved(two_hosts, pid, *hooks, f"ip address add {MOVING}; sleep 5")
    assert tables(b) == []
    wait_for_count(b.outside(LOG), numbers(b.outside(LOG))[-1] + 100)
    assert "OUTSIDE" not in b.outside(LOG).read_text()


def test_what_held_packets_back_goes_where_the_copy_does_not_come_up(two_hosts):
    a, b = two_hosts.a, two_hosts.b
    begin_far_end(two_hosts, TALK)
    pid = a.python("hearer.py", LOG, "10.99.0.20", 4712)
    wait_for_count(a.outside(LOG), 100)
    answer = migrate(
        two_hosts,
        pid,
        *("--tcp", "keep", "--pre-dump", f"ip address del {MOVING}"),
        *("--post-dump", f"ip address add {MOVING}"),
        *("--pre-restore", f"ip address add {MOVING}; sleep 5; exit 1"),
        *("--post-restore", f"ip address del {MOVING}"),
    )
    assert (answer.status, answer.report["process"]) == (30, "running"), explain(answer)
    assert tables(b) == []
    wait_for_count(a.outside(LOG), numbers(a.outside(LOG))[-1] + 100)
    assert "OUTSIDE" not in a.outside(LOG).read_text()


def owners(host: Host) -> list[int]:
    """Owners of gpuckpt's that run there, by their pids outside."""
    return [pid for pid, argv in host._processes() if b"gpuckpt.owner.process" in argv]


TALK = """
import itertools, pathlib, socket, time
listener = socket.create_server(("10.99.0.20", 4712))
pathlib.Path("/srv/listens").touch()
caller = listener.accept()[0]
for number in itertools.count(1):
    caller.sendall(b"%d\\n" % number)
    time.sleep(0.005)
"""


def says(answer: Answer, check: str) -> str:
    """What the report says of a check, here and there."""
    return " ".join(one["found"] for one in answer.report["findings"] if one["id"] == check)


ECHO = """
import pathlib, socket
listener = socket.create_server(("10.99.0.20", 4712))
pathlib.Path("/srv/listens").touch()
while True:
    caller = listener.accept()[0]
    while said := caller.recv(1000):
        caller.sendall(said)
"""


def test_what_was_sent_before_is_not_sent_again(two_hosts):
    a, b = two_hosts.a, two_hosts.b
    pid = a.python("counter.py", LOG, 40)
    wait_for_count(a.outside(LOG), 3)
    answer = moved(two_hosts, pid, "--pre-seed", to="b:/srv/images")
    data = answer.report["data"]
    assert data["seed"]["bytes_sent"] > 40_000_000
    assert data["seed"]["unpacked_bytes"] > 40_000_000
    assert data["bytes_sent"] < 8_000_000
    b.run("kill", "-USR1", pid)
    wait_for(lambda: "SUM" in b.outside(LOG).read_text(), "the job looks at its memory")
    assert "XSUM" in b.outside(LOG).read_text()
    assert [one.name for one in b.outside("/srv/images").iterdir()] == [f"a-{pid}-{data['image_id'][:8]}"]


def test_streams_that_lead_outside_go_on_into_files_of_the_other_host(two_hosts):
    a, b = two_hosts.a, two_hosts.b
    job = a.start("setsid", sys.executable, PROGRAMS / "talker.py", LOG, stdin=subprocess.PIPE)
    wait_for_count(a.outside(LOG), 3)
    pid = int(a.run("pgrep", "-f", "talker.py").stdout)
    assert "stdio" in refused(migrate(two_hosts, pid))
    answer = migrate(two_hosts, pid, "--stdin", "/dev/null", "--stdout", "/srv/nowhere/out", "--stderr", "/srv/err")
    assert answer.status == 21 and "/srv/nowhere" in answer.error["message"], explain(answer)
    files = ("--stdin", "/dev/null", "--stdout", "/srv/out", "--stderr", "/srv/err")
    answer = migrate(two_hosts, pid, *files)
    assert answer.status == 0, explain(answer)
    wait_for(lambda: b.outside("/srv/out").exists() and b.outside("/srv/out").read_text(), "it speaks there")
    for pipe in (job.stdin, job.stdout, job.stderr):
        pipe.close()
    job.wait(30)


@pytest.fixture
def job(two_hosts):
    """A counter on a, which must go on there."""
    pid = two_hosts.a.python("counter.py", LOG, 30)
    wait_for_count(two_hosts.a.outside(LOG), 3)
    return pid


def test_what_cannot_work_there_is_refused_before_anything_is_touched(two_hosts, job):
    b = two_hosts.b
    plan = migrate(two_hosts, job, "--dry-run", "--metrics-file", "/srv/no/job.prom")
    assert (plan.status, plan.report["outcome"]) == (0, "planned"), explain(plan)
    assert "there is no directory /srv/no" in says(plan, "metrics-file")
    assert plan.report["data"]["estimate"]["image_bytes"] > 30_000_000

    b.run("sh", "-c", f"echo {job - 1} > /proc/sys/kernel/ns_last_pid; setsid sleep 1000 </dev/null >/dev/null 2>&1 &")
    assert b.alive(job)
    answer = migrate(two_hosts, job)
    assert refused(answer) == "pids-free"
    assert f"{job} by" in answer.error["message"]
    b.run("kill", "-KILL", job)

    b.outside("/srv/small").mkdir(mode=0o700)
    b.run("mount", "-t", "tmpfs", "-o", "size=20m,mode=700", "tmpfs", "/srv/small")
    assert refused(migrate(two_hosts, job, to="b:/srv/small")) == "disk-space"

    assert migrate(two_hosts, job, reach=("--ssh-config", two_hosts.config)).status == 10  # no gpuckpt there
    old = (
        f"import sys; from gpuckpt.stores import frames; frames.FEATURES = (); sys.argv = ['gpuckpt', 'serve']; {MAIN}"
    )
    command = REMOTE_COMMAND.replace("-m gpuckpt", f"-c {shlex.quote(old)}")
    answer = migrate(two_hosts, job, reach=("--ssh-config", two_hosts.config, "--remote-command", command))
    assert answer.status == 10 and "too old" in answer.error["message"], explain(answer)

    for words in (("--stdout", "relative"), ("--carry-files", ""), ("--gpu", "x")):
        assert migrate(two_hosts, job, *words).status == 2
    assert migrate(two_hosts, job, to="b:relative").status == 2
    assert_untouched(two_hosts, job)
    moved(two_hosts, job)


MAIN = "from gpuckpt.cli.app import main; main()"


def test_files_are_compared_there_and_go_along_where_they_differ(two_hosts):
    a, b = two_hosts.a, two_hosts.b
    for host, text in ((a, "content"), (b, "CONTENT")):
        host.outside("/srv/data").write_text(text)
    a.outside("/srv/libz.so.1").write_bytes(LIBRARY.read_bytes())
    opens = 'exec 7</srv/data; LD_PRELOAD=/srv/libz.so.1 exec "$@"'
    pid = a.daemon("sh", "-c", opens, "sh", sys.executable, PROGRAMS / "counter.py", LOG, 5)
    wait_for_count(a.outside(LOG), 3)

    answer = migrate(two_hosts, pid, "--carry-files", "/srv/*")  # a library is never carried
    assert refused(answer) == "files-missing"
    assert "/srv/libz.so.1" in answer.error["message"]
    b.outside("/srv/libz.so.1").write_bytes(LIBRARY.read_bytes())
    answer = migrate(two_hosts, pid)
    assert refused(answer) == "files-content"
    assert "/srv/data" in answer.error["message"]

    b.outside(LOG).write_text("another's\n")
    answer = moved(two_hosts, pid, "--carry-files", "all")
    assert b.outside("/srv/data").read_text() == "content"
    acts = {one["path"]: one for one in answer.report["data"]["files"]}
    assert acts["/srv/data"]["act"] == acts[LOG]["act"] == "replace"
    assert b.outside(acts[LOG]["kept_as"]).read_text() == "another's\n"


def test_a_working_directory_goes_along_with_all_below_it(two_hosts):
    a, b = two_hosts.a, two_hosts.b
    here, there = a.outside("/srv/app"), b.outside("/srv/app")
    (here / "data/empty").mkdir(parents=True)
    (here / "data/one").write_text("content")
    (here / "data/two").hardlink_to(here / "data/one")
    (here / "data/other").symlink_to("/etc/nowhere")
    (here / "outside").symlink_to("/usr")
    os.mkfifo(here / "fifo")
    os.chown(here / "data/one", 1234, 1235)
    (here / "data/one").chmod(0o640)
    for one in (here / "data/one", here / "data/empty", here / "data", here):
        os.utime(one, (1_000_000_000, 1_000_000_000))
    pid = a.daemon("env", "--chdir=/srv/app", sys.executable, PROGRAMS / "counter.py", LOG, 5)
    wait_for_count(a.outside(LOG), 3)
    plan = migrate(two_hosts, pid, "--carry-files", "all", "--dry-run")
    figures = {"path": "/srv/app", "files": 2, "directories": 2, "links": 2, "bytes": 14, "left": 1}
    assert plan.report["data"]["working_directories"] == [figures], explain(plan)
    assert "/srv/app: 2 files" in says(plan, "working-directories")

    b.run("mount", "-t", "tmpfs", "-o", "size=40k", "tmpfs", "/srv")
    (here / "data/large").write_bytes(bytes(range(256)) * 400)
    answer = migrate(two_hosts, pid, "--carry-files", "all", to="b:/dev/shm")
    assert refused(answer) == "files-room" and "needed" in answer.error["message"], explain(answer)
    b.run("umount", "/srv")
    (here / "data/large").unlink()
    os.utime(here / "data", (1_000_000_000, 1_000_000_000))

    # Its far side is killed before the copy runs: what it made goes with the next one.
    main = a.start_gpuckpt(
        *("migrate", "--tree", pid, "b", *two_hosts.reach, *SETTLE, "--carry-files", "all"),
        *("--pre-restore", "test -d /srv/app/data/empty && touch /srv/made && sleep 60"),
    )
    wait_for(b.outside("/srv/made").exists, "the copy is about to come up")
    for number in b.serving():
        os.kill(number, signal.SIGKILL)
    said, errors = main.communicate(timeout=200)
    assert json.loads(said)["process"] == "running", (said, errors)
    assert (there / "data/empty").exists()
    answer = migrate(two_hosts, pid, "--pre-restore", "exit 1")
    assert (answer.status, answer.report["process"]) == (30, "running"), explain(answer)
    assert "--pre-restore" in answer.error["message"]
    assert not there.exists()

    answer = moved(two_hosts, pid, "--carry-files", "all")
    assert (there / "data/one").samefile(there / "data/two")
    seen = (there / "data/one").stat()
    assert (seen.st_uid, seen.st_gid, seen.st_mode & 0o7777, seen.st_mtime) == (1234, 1235, 0o640, 1_000_000_000)
    assert {one.stat().st_mtime for one in (there / "data/empty", there / "data", there)} == {1_000_000_000}
    assert os.readlink(there / "data/other") == "/etc/nowhere"
    assert sorted(one.name for one in there.iterdir()) == ["data", "outside"]
    assert not list(Path("/var/lib/gpuckpt/incoming").glob("*.made"))


def test_large_files_are_sent_before_the_job_stands_still(two_hosts):
    """200 MB at 25 MB/s would take eight seconds; of what changes after it was sent, only that is sent again."""
    a, b = two_hosts.a, two_hosts.b
    here, there = a.outside("/srv/app"), b.outside("/srv/app")
    here.mkdir()
    (here / "data").write_bytes(os.urandom(1 << 20) * 200)
    (here / "changes").write_bytes(b"1" * (2 << 20))
    pid = a.daemon("env", "--chdir=/srv/app", sys.executable, PROGRAMS / "counter.py", LOG, 5)
    wait_for_count(a.outside(LOG), 3)
    change = ("--pre-dump", "printf 2 | dd of=/srv/app/changes bs=1 seek=1000000 conv=notrunc")
    answer = moved(two_hosts, pid, "--carry-files", "all", "--bwlimit", "25M", *change)
    data = answer.report["data"]
    assert data["files_sent_before"]["files"] == 2
    assert data["files_sent_before"]["bytes_sent"] > 200_000_000
    assert 2_000_000 < data["bytes_sent"] < 20_000_000
    assert data["downtime_seconds"] < 5, data["seconds"]
    for name in ("data", "changes"):
        assert (there / name).read_bytes() == (here / name).read_bytes()
    assert (there / "changes").read_bytes().count(b"2") == 1
    assert (there / "data").stat().st_nlink == 1
    for place in ("incoming", "outgoing"):
        assert not list(Path(f"/var/lib/gpuckpt/{place}").glob(f"*{pid}-{data['image_id'][:8]}*"))


def test_files_that_were_sent_go_again_where_the_job_stays(two_hosts):
    a, b = two_hosts.a, two_hosts.b
    a.outside("/srv/app").mkdir()
    a.outside("/srv/app/data").write_bytes(os.urandom(9 << 20))
    pid = a.daemon("env", "--chdir=/srv/app", sys.executable, PROGRAMS / "counter.py", LOG, 5)
    wait_for_count(a.outside(LOG), 3)
    b.outside("/srv/images").mkdir(mode=0o700)
    seen = "test -d /srv/images/*-files && exit 1"
    answer = migrate(two_hosts, pid, "--carry-files", "all", "--pre-restore", seen, to="b:/srv/images")
    assert (answer.status, answer.report["process"]) == (30, "running"), explain(answer)
    assert "--pre-restore" in answer.error["message"]
    assert_untouched(two_hosts, pid)


def test_files_that_were_sent_go_again_where_the_job_is_refused_then(two_hosts):
    a, b = two_hosts.a, two_hosts.b
    a.outside("/srv/app").mkdir()
    a.outside("/srv/app/data").write_bytes(os.urandom(20 << 20))
    pid = a.daemon("env", "--chdir=/srv/app", sys.executable, PROGRAMS / "counter.py", LOG, 5)
    wait_for_count(a.outside(LOG), 3)
    images = b.outside("/srv/images")
    images.mkdir(mode=0o700)
    reach = ("b:/srv/images", *two_hosts.reach, *SETTLE, "--carry-files", "all", "--bwlimit", "5M")
    main = a.start_gpuckpt("migrate", "--tree", pid, *reach)
    wait_for(lambda: list(images.glob("*-files.partial")), "files are sent beforehand")
    b.run("sh", "-c", f"echo {pid - 1} > /proc/sys/kernel/ns_last_pid; setsid sleep 1000 </dev/null >/dev/null 2>&1 &")
    assert b.alive(pid)
    said, errors = main.communicate(timeout=200)
    assert main.returncode == 20 and "pids-free" in json.loads(said)["error"]["message"], (said, errors)
    assert_untouched(two_hosts, pid)


def with_large_file(hosts: TwoHosts, mib: int = 20) -> int:
    """A job on a, in a directory with a file that is worth sending beforehand."""
    hosts.a.outside("/srv/app").mkdir()
    hosts.a.outside("/srv/app/data").write_bytes(os.urandom(mib << 20))
    hosts.b.outside("/srv/images").mkdir(mode=0o700)
    pid = hosts.a.daemon("env", "--chdir=/srv/app", sys.executable, PROGRAMS / "counter.py", LOG, 5)
    wait_for_count(hosts.a.outside(LOG), 3)
    return pid


@pytest.mark.parametrize(
    ("name", "options"), [("kept-files", ("--carry-files", "all")), ("kept-seed", ("--pre-seed",))]
)
def test_what_has_the_name_of_an_image_sent_beforehand_stays(two_hosts, name, options):
    pid = with_large_file(two_hosts)
    own = two_hosts.a.outside(f"/srv/{name}")
    own.mkdir()
    (own / "thesis").write_text("years of work")
    answer = migrate(two_hosts, pid, "--keep-image", "/srv/kept", *options, to="b:/srv/images")
    assert (answer.status, answer.report["process"]) == (20, "untouched"), explain(answer)
    assert f"/srv/{name} exists" in answer.error["message"]
    assert (own / "thesis").read_text() == "years of work"
    assert_untouched(two_hosts, pid)


def test_the_disk_of_a_running_job_is_not_filled_up_with_files_to_be_sent(two_hosts):
    pid, a = with_large_file(two_hosts, 60), two_hosts.a
    a.run("mkdir", "-m", "700", "/srv/small")
    a.run("mount", "-t", "tmpfs", "-o", "size=110m,mode=700", "tmpfs", "/srv/small")
    answer = moved(two_hosts, pid, "--keep-image", "/srv/small/kept", "--carry-files", "all", to="b:/srv/images")
    assert answer.report["data"]["files_sent_before"] == {"files": 0, "bytes_sent": 0}
    assert two_hosts.b.outside("/srv/app/data").read_bytes() == a.outside("/srv/app/data").read_bytes()


@pytest.mark.parametrize("options", [("--carry-files", "all"), ("--pre-seed",)])
def test_what_was_sent_goes_again_where_a_command_of_the_user_refuses_then(two_hosts, options):
    pid = with_large_file(two_hosts)
    answer = migrate(two_hosts, pid, *options, "--pre-dump", "exit 7", to="b:/srv/images")
    assert (answer.status, answer.report["process"]) == (20, "untouched"), explain(answer)
    assert_untouched(two_hosts, pid)


@pytest.mark.parametrize("options", [("--carry-files", "all"), ("--pre-seed",)])
def test_what_is_being_sent_goes_again_where_that_is_broken_off(two_hosts, options):
    pid = with_large_file(two_hosts)
    images = two_hosts.b.outside("/srv/images")
    reach = ("b:/srv/images", *two_hosts.reach, *SETTLE, *options, "--bwlimit", "3M")
    main = two_hosts.a.start_gpuckpt("migrate", "--tree", pid, *reach)
    wait_for(lambda: any(one.stat().st_size for one in images.glob("*.partial/journal")), "a piece has arrived")
    two_hosts.a.signal(main, signal.SIGTERM)
    said, errors = main.communicate(timeout=200)
    assert main.returncode == 128 + signal.SIGTERM, (said, errors)
    assert_untouched(two_hosts, pid)


LIBRARY = next(one for one in map(Path, ("/lib/x86_64-linux-gnu/libz.so.1", "/usr/lib64/libz.so.1")) if one.exists())


def test_a_disk_that_fills_up_there_meanwhile_costs_the_job_nothing(two_hosts):
    a, b = two_hosts.a, two_hosts.b
    b.outside("/srv/images").mkdir(mode=0o700)
    b.run("mount", "-t", "tmpfs", "-o", "size=100m,mode=700", "tmpfs", "/srv/images")
    pid = a.python("counter.py", LOG, 40)
    wait_for_count(a.outside(LOG), 3)
    main = a.start_gpuckpt(
        "migrate", "--tree", pid, "b:/srv/images", *two_hosts.reach, *SETTLE, "--bwlimit", "10M",
    )  # fmt: skip
    b.run(
        "sh",
        "-c",
        "until ls -d /srv/images/*.partial; do sleep 0.02; done; dd if=/dev/zero of=/srv/images/full bs=1M || true",
    )
    said, errors = main.communicate(timeout=200)
    report = json.loads(said)
    assert (main.returncode, report["process"]) == (30, "running"), (report["error"], errors)
    assert "disk is full" in report["error"]["message"]
    b.run("rm", "/srv/images/full")
    assert_untouched(two_hosts, pid)
    moved(two_hosts, pid, to="b:/srv/images")


@pytest.fixture
def gpus(two_hosts, fake_gpu_libraries):
    """A fake GPU on each host, under the same path."""
    made = [FakeGpu(host.outside("/srv/gpu"), fake_gpu_libraries) for host in two_hosts.hosts]
    for gpu in made:
        gpu.configure(total=8 << 30)
    return made


ON_GPU = ("env", "FAKEGPU_DIR=/srv/gpu", "LD_LIBRARY_PATH=/srv/gpu/lib", f"PYTHONPATH={PROGRAMS.parents[1]}")


def start_on_gpu(hosts: TwoHosts) -> int:
    """A program with memory on the GPU of a."""
    pid = hosts.a.daemon(*ON_GPU, sys.executable, PROGRAMS.parent / "fakegpu" / "fake_cuda_app.py", LOG, "--mib", 16)
    wait_for_count(hosts.a.outside(LOG), 3)
    return pid


def start_migration(hosts: TwoHosts, pid: int, *options: object) -> subprocess.Popen:
    """From a to b, with the GPUs of both."""
    far = f"{' '.join(ON_GPU)} {sys.executable} -m gpuckpt"
    reach = ("--ssh-config", hosts.config, "--remote-command", far)
    argv = (*ON_GPU, sys.executable, "-m", "gpuckpt", "migrate", "--tree", pid, "b", *reach, *SETTLE, "--json")
    return hosts.a.start(*argv, *options)


def checksum(host: Host, pid: int) -> str:
    """The digest of the GPU memory, asked of the program."""
    before = host.outside(LOG).read_text().count("XSUM")
    host.run("kill", "-USR1", pid)
    wait_for(lambda: host.outside(LOG).read_text().count("XSUM") > before, "it digests its GPU memory")
    return host.outside(LOG).read_text().rpartition("XSUM ")[2].split()[0]


def acts(gpu: FakeGpu) -> list[str]:
    """What the driver was told to do, in order."""
    return [act for act, _ in gpu.calls() if act in ("lock", "checkpoint", "restore", "unlock")]


def test_a_gpu_program_moves_with_its_gpu_memory(two_hosts, gpus):
    pid = start_on_gpu(two_hosts)
    before = checksum(two_hosts.a, pid)
    said, errors = start_migration(two_hosts, pid).communicate(timeout=200)
    report = json.loads(said)
    assert (report["outcome"], report["process"]) == ("ok", "restored"), (report["error"], errors)
    assert {"lock", "gpu_to_host", "host_to_gpu"} <= set(report["data"]["seconds"])
    goes_on(two_hosts.b.outside(LOG), numbers(two_hosts.a.outside(LOG))[-1])
    assert checksum(two_hosts.b, pid) == before
    assert (acts(gpus[0]), acts(gpus[1])) == (["lock", "checkpoint"], ["restore", "unlock"])
    assert (gpus[0].used_bytes(), gpus[1].used_bytes()) == (0, 16 << 20)


def test_a_copy_on_a_gpu_that_must_end_gives_its_gpu_back_first(two_hosts, gpus):
    pid = start_on_gpu(two_hosts)
    before = checksum(two_hosts.a, pid)
    main = start_migration(two_hosts, pid)
    a, b = two_hosts.a, two_hosts.b
    wait_for(lambda: "prepare" in main.stderr.readline(), "the copy comes up")
    a.signal(main, signal.SIGSTOP)
    wait_for(lambda: acts(gpus[1]) == ["restore", "unlock"], "its GPU memory is back")
    a.signal(main, signal.SIGKILL)
    main.send_signal(signal.SIGCONT)
    main.communicate(timeout=200)
    wait_for(lambda: acts(gpus[1])[2:] == ["lock", "checkpoint"], "it is suspended")
    wait_for(lambda: not b.alive(pid), "the copy ends")
    wait_for(lambda: acts(gpus[0]) == ["lock", "checkpoint", "restore", "unlock"], "the program goes on here")
    assert checksum(a, pid) == before


def test_an_image_sent_beforehand_stays_where_the_job_is_held_by_it(two_hosts, gpus):
    """It is complete, and may be all that comes back."""
    pid = start_on_gpu(two_hosts)
    gpus[0].fail("restore=999")
    main = start_migration(two_hosts, pid, "--pre-seed", "--keep-image", "/srv/kept")
    said, errors = main.communicate(timeout=200)
    assert (main.returncode, json.loads(said)["process"]) == (31, "frozen"), (said, errors)
    looked = two_hosts.a.gpuckpt("inspect", "/srv/kept-seed", "--verify")
    assert looked.status == 0 and looked.report["data"]["verified"] is True, explain(looked)

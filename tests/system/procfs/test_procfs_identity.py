import os
import signal
import subprocess
import threading

import pytest
from procfs_programs import wait_until

from gpuckpt.model.facts import ProcessId
from gpuckpt.system import procfs
from gpuckpt.system.procfs import identity, reading

FAMILY = """
first = os.fork()
if first == 0:
    if os.fork() == 0:
        ready(); forever()
    forever()
if os.fork() == 0:
    forever()
forever()
"""


def test_a_pid_with_another_start_time_is_another_process(programs):
    child = programs.start("ready(); forever()")
    real = procfs.process_id(child.pid)
    other = ProcessId(real.pid, real.start_ticks - 1)
    assert procfs.is_same(real)
    assert procfs.state(real) in {"S", "R"}
    assert not procfs.is_same(other)
    assert procfs.state(other) is None
    assert procfs.tree_ids(other) == []


def test_nothing_there():
    free = _free_pid()
    assert procfs.process_id(free) is None
    assert procfs.describe_pid(free).kind == "none"
    assert procfs.ancestors(free) == []
    assert procfs.threads(free) == []
    assert procfs.maps_of(free) == []


def _free_pid():
    used = set(reading.all_pids())
    return next(
        number for number in range(4_000_000, 100, -1) if number not in used and reading.stat_of(number) is None
    )


def test_tree_lists_the_root_first_and_parents_before_children(programs):
    child = programs.start(FAMILY)
    wait_until(lambda: len(procfs.tree_ids(procfs.process_id(child.pid))) == 4, "four processes")
    tree = procfs.tree_ids(procfs.process_id(child.pid))
    assert tree[0].pid == child.pid
    place = {process.pid: number for number, process in enumerate(tree)}
    for process in tree[1:]:
        assert place[reading.stat_of(process.pid).ppid] < place[process.pid]


def test_the_scan_for_kernels_without_children_files_finds_the_same(programs):
    child = programs.start(FAMILY)
    wait_until(lambda: len(procfs.tree_ids(procfs.process_id(child.pid))) == 4, "four processes")
    by_scan = identity._children_by_scan()
    for process in procfs.tree_ids(procfs.process_id(child.pid)):
        assert sorted(by_scan(process.pid)) == sorted(identity._children_by_file(process.pid))
    assert len(by_scan(child.pid)) == 2


def test_a_child_forked_by_a_second_thread_belongs_to_the_tree(programs):
    child = programs.start(
        """
def fork():
    if os.fork() == 0:
        ready(); forever()
    forever()
threading.Thread(target=fork, daemon=True).start()
forever()
"""
    )
    tree = procfs.tree_ids(procfs.process_id(child.pid))
    assert len(tree) == 2
    assert reading.stat_of(tree[1].pid).ppid == child.pid


def test_describe_thread(programs):
    child = programs.start("threading.Thread(target=forever, daemon=True).start(); ready(); forever()")
    tids = procfs.threads(child.pid)
    assert len(tids) == 2
    assert tids[0] == child.pid
    what = procfs.describe_pid(tids[1])
    assert (what.kind, what.tgid) == ("thread", child.pid)
    assert procfs.describe_pid(child.pid).kind == "process"
    assert procfs.describe_pid(child.pid).ppid == os.getpid()
    assert procfs.describe_pid(child.pid).uid == 0


def test_describe_zombie_kernel_thread_and_parent(programs):
    child = programs.start("pid = os.fork()\nif pid == 0: os._exit(0)\nready(); forever()")
    wait_until(lambda: len(procfs.tree_ids(procfs.process_id(child.pid))) == 2, "a child")
    zombie = procfs.tree_ids(procfs.process_id(child.pid))[1]
    wait_until(lambda: procfs.state(zombie) == "Z", "the child is a zombie")
    what = procfs.describe_pid(zombie.pid)
    assert what.kind == "zombie"
    assert what.parent == f"{child.pid} {reading.comm_of(child.pid)}"
    kernel = [pid for pid in reading.all_pids() if reading.stat_of(pid) and reading.stat_of(pid).kernel_thread]
    for pid in kernel[:1]:
        assert procfs.describe_pid(pid).kind == "kernel"


def test_ancestors_lead_from_the_parent_upwards(programs):
    child = programs.start(FAMILY)
    line = procfs.ancestors(child.pid)
    assert line[0] == (os.getpid(), reading.comm_of(os.getpid()))
    assert (os.getppid(), reading.comm_of(os.getppid())) in line


def test_numbers_in_use(programs):
    child = programs.start("threading.Thread(target=forever, daemon=True).start(); ready(); forever()")
    tid = procfs.threads(child.pid)[1]
    comm = reading.comm_of(child.pid)
    free = _free_pid()
    used = procfs.who_uses_ids([child.pid, tid, free])
    assert used == {child.pid: f"{child.pid} {comm}", tid: f"{child.pid} {comm} (as thread)"}


def test_a_session_without_its_leader_is_in_use(programs):
    child = programs.start(
        """
leader = os.fork()
if leader == 0:
    os.setsid()
    if os.fork() == 0:
        open(os.path.join(DIR, 'member'), 'w').write(str(os.getpid())); ready(); forever()
    os._exit(0)
os.waitpid(leader, 0)
open(os.path.join(DIR, 'leader'), 'w').write(str(leader)); ready('reaped'); forever()
""",
        until="reaped",
    )
    wait_until((programs.directory / "ready").exists, "the member runs")
    leader, member = (int((programs.directory / name).read_text()) for name in ("leader", "member"))
    try:
        assert procfs.process_id(leader) is None
        assert procfs.who_uses_ids([leader]) == {leader: f"{member} {reading.comm_of(member)} (as session id)"}
    finally:
        os.kill(member, signal.SIGKILL)  # it was reparented: no member of the child's tree any more
    assert child.poll() is None


def test_vanishing_while_read_is_no_error(programs):
    stop = threading.Event()
    failures = []

    def look(pid):
        while not stop.is_set():
            try:
                procfs.tree_ids(procfs.process_id(pid))
                procfs.read_tree(procfs.process_id(pid))
            except Exception as error:
                failures.append(error)
                return

    child = programs.start(
        """
ready()
while True:
    pid = os.fork()
    if pid == 0:
        a = socket.socketpair(); b = os.pipe(); os._exit(0)
    os.waitpid(pid, 0)
"""
    )
    threads = [threading.Thread(target=look, args=(child.pid,)) for _ in range(2)]
    for thread in threads:
        thread.start()
    stop.wait(2)
    stop.set()
    for thread in threads:
        thread.join()
    assert failures == []


def test_comm_with_brackets_and_blanks(programs):
    child = programs.start("ctypes.CDLL(None).prctl(15, b'a) R (b x', 0, 0, 0); ready(); forever()")
    stat = reading.stat_of(child.pid)
    assert stat.comm == "a) R (b x"
    assert stat.ppid == os.getpid()


@pytest.mark.parametrize("raw", [b"", b"12 (x", b"12 (x) S 1 2"])
def test_a_cut_stat_is_unknown(raw):
    assert reading.parse_stat(raw) is None


def test_stopped_is_seen(programs):
    child = programs.start("ready(); forever()")
    process = procfs.process_id(child.pid)
    assert procfs.send(process, signal.SIGSTOP)
    wait_until(lambda: procfs.state(process) == "T", "stopped")
    assert procfs.read_tree(process).stopped == (process,)
    assert procfs.send(process, signal.SIGCONT)
    wait_until(lambda: procfs.state(process) == "S", "goes on")


def test_send_reaches_only_the_one_that_was_meant(programs):
    child = programs.start("ready(); forever()")
    real = procfs.process_id(child.pid)
    assert not procfs.send(ProcessId(real.pid, real.start_ticks + 1), signal.SIGKILL)
    assert not procfs.send(ProcessId(_free_pid(), 1), signal.SIGKILL)
    assert child.poll() is None
    assert procfs.send(real, signal.SIGTERM)
    assert child.wait() == -signal.SIGTERM
    assert not procfs.send(real, signal.SIGTERM)
    assert not procfs.send_pid(_free_pid(), signal.SIGTERM)


def test_wait_gone_tells_zombies_from_the_living(programs):
    dead, alive = programs.start("ready(); forever()"), programs.start("ready(); forever()")
    ids = [procfs.process_id(child.pid) for child in (dead, alive)]
    procfs.send(ids[0], signal.SIGKILL)
    wait_until(lambda: procfs.state(ids[0]) == "Z", "unreaped")
    left = dict(procfs.wait_gone(ids, 0.05))
    assert left[ids[0]] == f"zombie of {os.getpid()} {reading.comm_of(os.getpid())}"
    assert left[ids[1]].startswith("state S")
    dead.wait()
    alive.kill()
    alive.wait()
    assert procfs.wait_gone(ids, 10) == []


def test_wait_ended_does_not_ask_for_the_pid(programs):
    dead, alive = programs.start("ready(); forever()"), programs.start("ready(); forever()")
    ids = [procfs.process_id(child.pid) for child in (dead, alive)]
    procfs.send(ids[0], signal.SIGKILL)
    assert procfs.wait_ended([ids[0]], 10) == []
    assert procfs.state(ids[0]) == "Z"
    assert procfs.wait_ended(ids, 0.05) == [ids[1]]
    alive.kill()
    assert procfs.wait_ended(ids, 10) == []


def test_a_first_thread_that_has_ended_is_not_the_end(programs):
    child = programs.start(
        """
import ctypes, threading
threading.Thread(target=forever).start()
ready(); ctypes.CDLL(None).syscall(60, 0)
"""
    )
    process = procfs.process_id(child.pid)
    wait_until(lambda: procfs.state(process) == "Z", "its first thread has ended")
    assert procfs.wait_ended([process], 0.05) == [process]
    procfs.send(process, signal.SIGKILL)
    assert procfs.wait_ended([process], 10) == []


def test_zombies_get_time_to_be_reaped_and_the_living_none(programs, monkeypatch):
    dead, alive = programs.start("ready(); forever()"), programs.start("ready(); forever()")
    dead.kill()
    wait_until(lambda: procfs.thread_state(dead.pid) == "Z", "unreaped")
    assert list(procfs.who_uses_ids([dead.pid], 0.05)) == [dead.pid]
    with monkeypatch.context() as no_waiting:
        no_waiting.setattr(identity.time, "sleep", lambda _seconds: pytest.fail("it waits for a process at work"))
        assert sorted(procfs.who_uses_ids([dead.pid, alive.pid], 60)) == sorted([dead.pid, alive.pid])
    reaper = threading.Timer(0.2, dead.wait)
    reaper.start()
    assert procfs.who_uses_ids([dead.pid], 30) == {}
    reaper.join()


def test_io_bytes_grow_with_what_is_read(programs):
    child = programs.start(
        """
ready()
while not os.path.exists(os.path.join(DIR, 'go')): time.sleep(0.01)
open('/dev/zero', 'rb', buffering=0).read(1 << 20); ready('done'); forever()
"""
    )
    before = procfs.io_bytes(child.pid)
    (programs.directory / "go").touch()
    wait_until((programs.directory / "done").exists, "it has read")
    assert procfs.io_bytes(child.pid) - before >= 1 << 20
    assert procfs.cpu_seconds(child.pid) >= 0
    assert procfs.io_bytes(_free_pid()) is None
    assert procfs.cpu_seconds(_free_pid()) is None
    assert procfs.wchan(_free_pid()) is None


def test_oom_score_adj_is_set_for_this_process_alone():
    code = (
        "from gpuckpt.system import procfs; print(procfs.set_own_oom_score_adj(500), open('/proc/self/oom_score_adj').read(),"
        " procfs.set_own_oom_score_adj(5000))"
    )
    import sys

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "500", "False"]

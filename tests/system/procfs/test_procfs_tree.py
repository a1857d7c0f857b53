import os
import signal

import pytest
from procfs_programs import wait_until

from gpuckpt.model.errors import MachineLacks, NotFound
from gpuckpt.model.facts import ProcessId, Tree
from gpuckpt.model.jsonform import from_json, to_json
from gpuckpt.system import procfs


def test_what_a_process_is(programs, read, tmp_path):
    tmp_path.chmod(0o777)
    child = programs.start(
        """
os.chdir(DIR)
keep = bytearray(32 << 20)
shared = mmap.mmap(-1, 16 << 20); shared[:] = b'x' * len(shared)
threading.Thread(target=forever, daemon=True).start()
os.setresgid(34, 34, 34); os.setresuid(12, 12, 12)
os.environ['LATER'] = 'x'
open('ready', 'w').close(); forever()  # by its relative name: the directories above are closed to this user
""",
        arguments=("--token", "hunter2", "x", ""),
        env={"GIVEN": "a=b", "PASSWORD": "hunter3"},
    )
    tree = read(child)
    (process,) = tree.processes
    assert tree.root == process.id == procfs.process_id(child.pid)
    assert (process.ppid, process.pgid, process.sid) == (os.getpid(), child.pid, child.pid)
    assert (process.uid, process.gid) == (12, 34)
    assert process.cwd == str(tmp_path)
    assert process.root == "/"
    assert process.exe == os.path.realpath(f"/proc/{child.pid}/exe")
    assert len(process.threads) == 2
    assert process.state == "S"
    assert process.rss_bytes >= 48 << 20
    assert 16 << 20 <= process.shared_bytes < 32 << 20
    assert set(process.namespaces) >= {"pid", "net", "mnt", "user", "ipc", "uts", "cgroup"}
    assert process.namespaces["pid"] == os.readlink("/proc/self/ns/pid")
    assert not process.kernel_thread
    assert process.tracer_pid == 0
    assert process.argv[-4:] == ("--token", "***", "x", "")
    assert read(child, keep_argv=True).processes[0].argv[-4:] == ("--token", "hunter2", "x", "")
    assert {"GIVEN", "PASSWORD", "TEST_DIR"} <= set(process.environment_names)
    assert "LATER" not in process.environment_names
    assert "hunter" not in str(to_json(tree))
    assert tree.cuda == tree.gpu_uses == ()


def test_a_tree_survives_the_manifest(programs, read):
    tree = read(programs.start("if os.fork() == 0: ready(); forever()\na = socket.socketpair(); forever()"))
    assert from_json(Tree, to_json(tree)) == tree


def test_a_root_that_is_gone():
    with pytest.raises(NotFound):
        procfs.read_tree(ProcessId(os.getpid(), 1))


def test_zombies_and_stopped_children_belong_to_it(programs, read):
    child = programs.start(
        """
if os.fork() == 0: os._exit(0)
stopped = os.fork()
if stopped == 0: forever()
os.kill(stopped, 19); ready(); forever()
"""
    )
    wait_until(
        lambda: sorted(p.state for p in read(child).processes) == ["S", "T", "Z"], "a zombie and a stopped child"
    )
    tree = read(child)
    zombie = next(process for process in tree.processes if process.state == "Z")
    assert (zombie.argv, zombie.exe, zombie.descriptors) == ((), "", ())
    assert [process.pid for process in tree.stopped] == [p.pid for p in tree.processes if p.state == "T"]


def test_an_overwritten_command_line_is_redacted_too(programs, read):
    child = programs.start(
        """
raw = open('/proc/self/stat').read().rpartition(')')[2].split()
start, end = int(raw[45]), int(raw[46])
text = b'engine --api-key hunter2 --port 1'
ctypes.memset(start, 0, end - start); ctypes.memmove(start, text, len(text))
env, envend = int(raw[47]), int(raw[48])
ctypes.memset(env, 0, envend - env); ctypes.memmove(env, b'HUNTER\\0hunter2=x y=\\0VALID=1', 27)
ready(); forever()
"""
    )
    (process,) = read(child).processes
    assert process.argv == ("engine --api-key *** --port 1",)
    assert process.environment_names == ("hunter2", "VALID")


def test_traced(programs, read):
    child = programs.start(
        """
pid = os.fork()
if pid == 0: forever()
libc = ctypes.CDLL(None)
assert libc.ptrace(0x4206, pid, 0, 0) == 0  # PTRACE_SEIZE
ready(); forever()
"""
    )
    tree = read(child)
    assert tree.processes[1].tracer_pid == child.pid
    assert procfs.describe_pid(tree.pids[1]).tracer.startswith(f"{child.pid} ")


def test_seccomp(programs, read):
    child = programs.start(
        """
libc = ctypes.CDLL(None, use_errno=True)
allow = struct.pack('HBBI', 6, 0, 0, 0x7fff0000); buffer = ctypes.create_string_buffer(allow)
program = struct.pack('H6xQ', 1, ctypes.addressof(buffer))
assert libc.prctl(38, 1, 0, 0, 0) == 0 and libc.prctl(22, 2, program, 0, 0) == 0
ready(); forever()
"""
    )
    assert read(child).processes[0].seccomp == 2


def test_without_the_right_to_look_it_is_an_error_not_an_empty_tree(programs):
    child = programs.start("ready(); forever()")
    pid = os.fork()
    if pid == 0:
        try:
            os.setresuid(12, 12, 12)
            procfs.read_tree(procfs.process_id(child.pid))
        except MachineLacks:
            os._exit(7)
        except BaseException:
            os._exit(8)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7


def test_a_big_tree(programs, read):
    child = programs.start(
        """
keep = [mmap.mmap(-1, 8192, prot=1 + n % 2 * 2) for n in range(500)]
for number in range(60):
    if os.fork() == 0:
        open(os.path.join(DIR, 'n%d' % number), 'w').close(); forever()
while len(os.listdir(DIR)) < 61: time.sleep(0.01)
ready(); forever()
"""
    )
    tree = read(child)
    assert len(tree.processes) == 61
    assert len(set(tree.pids)) == 61
    child.send_signal(signal.SIGCONT)

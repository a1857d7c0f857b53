"""The fake itself: its restore thread works while all others are held, faults do what they say, CRIU can move it."""

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest

from gpuckpt.accelerators import cuda
from gpuckpt.accelerators.protocol import DriverError
from gpuckpt.system import commands

SEIZE, INTERRUPT, DETACH = 0x4206, 0x4207, 17
WAIT_ALL = 0x40000000
CRIU_SECONDS = 60


@pytest.fixture
def api(fake_gpu):
    return cuda.CudaApi(cuda.load(fake_gpu.libcuda), initialise=False)


def ptrace(request, tid):
    libc = ctypes.CDLL(None, use_errno=True)
    libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
    libc.ptrace.restype = ctypes.c_long
    if libc.ptrace(request, tid, 0, 0) < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


@contextlib.contextmanager
def held(pid, free_tid):
    """All threads but one in a ptrace stop."""
    tids = [int(name) for name in os.listdir(f"/proc/{pid}/task") if int(name) != free_tid]
    for tid in tids:
        ptrace(SEIZE, tid)
        ptrace(INTERRUPT, tid)
    for tid in tids:
        os.waitpid(tid, WAIT_ALL)
    yield
    for tid in tids:
        ptrace(DETACH, tid)


def mapping_size(ends):
    low, high = (int(end, 16) for end in ends.split("-"))
    return high - low


def wait_for_stop(pid):
    end = time.monotonic() + 10
    while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        assert time.monotonic() < end
        time.sleep(0.005)


def open_links(app) -> list[str]:
    """What it has open; its restore thread may close a descriptor while we look."""
    found = []
    for link in Path(f"/proc/{app.pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found.append(str(link.readlink()))
    return found


def test_the_restore_thread_works_while_every_other_thread_is_held(api, start_fake_cuda_app, fake_gpu):
    app = start_fake_cuda_app("--mib", "4")
    before = app.checksum()
    api.lock(app.pid, 5000)
    with held(app.pid, app.restore_tid()):
        counts = app.thread_counts()
        api.checkpoint(app.pid)
        assert fake_gpu.used_bytes() == 0
        assert not [link for link in open_links(app) if link.endswith(".mem")]
        api.restore(app.pid, {})
        api.unlock(app.pid)
        assert app.thread_counts() == counts
    app.wait_for_steps(2)
    assert app.checksum() == before
    assert fake_gpu.used_bytes() == 4 << 20


def test_the_copy_is_one_private_anonymous_mapping(api, start_fake_cuda_app):
    app = start_fake_cuda_app("--mib", "32")
    api.lock(app.pid, 5000)
    maps = set(Path(f"/proc/{app.pid}/maps").read_text().splitlines())
    api.checkpoint(app.pid)
    added = [line.split() for line in Path(f"/proc/{app.pid}/maps").read_text().splitlines() if line not in maps]
    large = [words[1] for words in added if mapping_size(words[0]) >= 32 << 20]
    assert large == ["rw-p"]


def test_a_device_node_is_held_only_while_on_the_gpu(api, start_fake_cuda_app):
    app = start_fake_cuda_app("--device", "/dev/zero")
    assert "/dev/zero" in open_links(app)
    api.lock(app.pid, 5000)
    api.checkpoint(app.pid)
    assert "/dev/zero" not in open_links(app)
    api.restore(app.pid, {})
    assert "/dev/zero" in open_links(app)


def test_children(api, start_fake_cuda_app):
    app = start_fake_cuda_app("--children", "2", "--fork", "1")
    time.sleep(0.5)
    children = [int(pid) for pid in Path(f"/proc/{app.pid}/task/{app.pid}/children").read_text().split()]
    kinds = sorted(api.restore_tid(pid) is not None for pid in children)
    assert kinds == [False, True, True]


@pytest.mark.parametrize(("fault", "code"), [("lock=999", 999), ("lock=fail:304", 304), ("lock=kill", 304)])
def test_faults(api, start_fake_cuda_app, fake_gpu, fault, code):
    app = start_fake_cuda_app()
    fake_gpu.fail(fault)
    with pytest.raises(DriverError) as caught:
        api.lock(app.pid, 1000)
    assert caught.value.code == code
    if fault == "lock=kill":
        assert app.process.wait(5) == -signal.SIGSEGV
        assert code_of(api.state, app.pid) == 304
    else:
        assert api.state(app.pid) == ("failed" if "fail" in fault else "running")


def code_of(call, *arguments):
    with pytest.raises(DriverError) as caught:
        call(*arguments)
    return caught.value.code


def test_faults_of_one_process_or_one_call(api, start_fake_cuda_app, fake_gpu):
    first, second = start_fake_cuda_app(), start_fake_cuda_app()
    fake_gpu.fail(f"lock=999 pid {second.pid}", "unlock=801 call 1", "checkpoint=2 after 1")
    api.lock(first.pid, 1000)
    assert code_of(api.lock, second.pid, 1000) == 999
    assert code_of(api.unlock, first.pid) == 801
    api.checkpoint(first.pid)
    fake_gpu.fail("checkpoint=2 after 1")
    api.lock(second.pid, 1000)
    assert code_of(api.checkpoint, second.pid) == 2
    assert ("checkpoint", second.pid) in fake_gpu.calls()


def test_a_call_that_hangs_a_while(api, start_fake_cuda_app, fake_gpu):
    app = start_fake_cuda_app()
    fake_gpu.fail("lock=hang:0.5", "checkpoint=hang")
    begin = time.monotonic()
    api.lock(app.pid, 1000)
    assert time.monotonic() - begin >= 0.5
    caller = threading.Thread(target=code_of, args=(api.checkpoint, app.pid), daemon=True)
    caller.start()
    caller.join(0.5)
    assert caller.is_alive()
    app.stop()
    caller.join(10)
    assert not caller.is_alive()


def criu(verb, *arguments, plugins):
    program = commands.find_program("criu", os.environ.get("GPUCKPT_CRIU"))
    common = ["--no-default-config", "--manage-cgroups=ignore", "-L", str(plugins), "-v4"]
    return subprocess.run(
        [str(program), verb, *arguments, *common], check=False, capture_output=True, timeout=CRIU_SECONDS
    )


def need_criu(plugins):
    if os.geteuid() != 0:
        pytest.skip("needs root")
    if commands.find_program("criu", os.environ.get("GPUCKPT_CRIU")) is None:
        pytest.skip("no criu here")
    if (done := criu("check", plugins=plugins)).returncode:
        pytest.skip(f"criu check: {done.stderr[-200:]!r}")


@pytest.mark.criu
def test_criu_moves_a_checkpointed_process(api, start_fake_cuda_app, fake_gpu, tmp_path):
    plugins, images = tmp_path / "plugins", tmp_path / "images"
    plugins.mkdir()
    images.mkdir()
    need_criu(plugins)
    app = start_fake_cuda_app("--mib", "16")
    before = app.checksum()
    api.lock(app.pid, 5000)
    tid = app.restore_tid()
    with held(app.pid, tid):
        api.checkpoint(app.pid)
        steps, counts = app.steps(), app.thread_counts()
        os.kill(app.pid, signal.SIGSTOP)
    wait_for_stop(app.pid)
    done = criu("dump", "-t", str(app.pid), "-D", str(images), "-o", "dump.log", plugins=plugins)
    assert done.returncode == 0, (images / "dump.log").read_text()[-3000:]
    app.process.wait(10)
    done = criu("restore", "-d", "-D", str(images), "-o", "restore.log", plugins=plugins)
    assert done.returncode == 0, (images / "restore.log").read_text()[-3000:]
    wait_for_stop(app.pid)
    assert app.restore_tid() == tid
    with held(app.pid, tid):
        os.kill(app.pid, signal.SIGCONT)
        assert api.state(app.pid) == "checkpointed"
        api.restore(app.pid, {})
        api.unlock(app.pid)
        assert (app.steps(), app.thread_counts()) == (steps, counts)
    app.wait_for_steps(3)
    assert app.checksum() == before
    everything = app.steps()
    assert everything == list(range(1, len(everything) + 1))
    shutil.rmtree(images)

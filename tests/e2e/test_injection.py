"""Memory written into the held tree: every byte of every sort comes back, and half a tree never runs."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import platform
import re
import shlex
import signal
import subprocess
import time
from pathlib import Path

import pytest

from gpuckpt.system import hostsettings
from tests import harness, packing
from tests.e2e import rounds
from tests.faults import arena
from tests.harness import gpuckpt, start_gpuckpt

pytestmark = pytest.mark.criu

MIB = 1 << 20


def dump(jobs, root, image, *options, **how):
    """A dump whose memory lies in packs."""
    answer = rounds.dump(jobs, root, image, *options, **how)
    packing.pack(image)
    return answer


def pages_are_filled() -> bool:
    """Whether this host lets fresh pages be filled by userfaultfd, and does not make huge ones."""
    made = ctypes.CDLL(None).syscall(323, os.O_CLOEXEC | 1) if platform.machine() == "x86_64" else -1
    if made >= 0:
        os.close(made)
    return made >= 0 and not hostsettings.makes_large_pages()


def descriptors(pid: int) -> list[str]:
    """What a process has open."""
    found = []
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found.append(str(link.readlink()))
    return found


def start(jobs, work, kind, megabytes=64):
    job = jobs.python("memory.py", kind, work / "log", megabytes)
    harness.wait_for_count(work / "log", 1)
    return job


def restored(jobs, image, *options, **how):
    return rounds.restore(jobs, image, *options, **how).report["data"]


def end(jobs, pids):
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    rounds.await_end(jobs, pids)


@pytest.mark.parametrize(
    ("kind", "megabytes", "injected"),
    [
        ("private", 256, 128),
        ("tree", 64, 60),
        ("shared", 96, 40),
        ("mappings", 96, 40),
        ("sparse", 96, 40),
        ("threads", 64, 120),
        ("signals", 96, 40),
        ("locked", 64, 30),
    ],
)
def test_every_byte_comes_back(work, jobs, kind, megabytes, injected):
    """Two rounds: the second one of the tree that the first has restored."""
    job = start(jobs, work, kind, megabytes)
    for number in range(2):
        image = work / f"img{number}"
        dump(jobs, job.pid, image)
        at_dump = harness.numbers(work / "log")[-1]
        data = restored(jobs, image)
        assert data["bytes_injected"] > injected * MIB, data
        if pages_are_filled():
            # One with many short runs of pages is not.
            assert data["bytes_filled"] > (data["bytes_injected"] * 0.9 if kind in ("private", "threads") else -1)
        assert {"criu", "inject", "ready"} <= set(data["seconds"])
        rounds.goes_on(work / "log", at_dump, more=2)
        for pid in data["pids"]:
            assert harness.state(pid) in ("S", "R"), pid
            assert "TracerPid:\t0\n" in Path(f"/proc/{pid}/status").read_text()
            flags = re.findall(r"^VmFlags:(.*)$", Path(f"/proc/{pid}/smaps").read_text(), re.MULTILINE)
            assert not any({"um", "uw", "ui"} & set(line.split()) for line in flags), "userfaultfd has stayed"
            assert not [link for link in descriptors(pid) if "userfaultfd" in link]


def test_what_is_shared_copy_on_write_stays_shared(work, jobs):
    job = start(jobs, work, "tree", 64)
    before = [private_kib(pid) for pid in rounds.descendants(job.pid)]
    dump(jobs, job.pid, work / "img")
    data = restored(jobs, work / "img")
    rounds.goes_on(work / "log", harness.numbers(work / "log")[-1], more=1)
    after = [private_kib(pid) for pid in data["pids"]]
    for then, now in zip(before, after, strict=True):
        assert now < then + 8192, (before, after)
    assert data["bytes_by_criu"] > 30 * MIB


def test_every_page_is_what_it_was(work, jobs):
    """Looked at from outside while the tree stands still: before the dump, and before an instruction after it."""
    job = start(jobs, work, "every", 72)
    pids = rounds.descendants(job.pid)
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
        harness.wait_for(lambda pid=pid: harness.state(pid) == "T", "it stops")
    before = {pid: pages(pid) for pid in pids}
    dump(jobs, job.pid, work / "img")
    at_dump = harness.numbers(work / "log")[-1]
    assert restored(jobs, work / "img")["bytes_injected"] > 32 * MIB
    for pid in pids:
        after = pages(pid)
        assert after.keys() == before[pid].keys()
        assert sum(kind == "large" for kind, _ in after.values()) > 32 * MIB / 4096
        # What the kernel itself writes: a signal's frame below the stack's top, and rseq beside the thread's own data.
        changed = [kind for at, (kind, page) in after.items() if page != before[pid][at][1]]
        assert len(changed) <= 4, changed
        assert set(changed) <= {"stack", "tiny"}, changed
    for pid in reversed(pids):
        os.kill(pid, signal.SIGCONT)
    rounds.goes_on(work / "log", at_dump, more=2)


def pages(pid) -> dict[int, tuple[str, bytes]]:
    """Address of every page that can be read -> the sort of its mapping, and its digest."""
    found = {}
    with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            span, flags, _, _, _, *name = line.split(None, 5)
            if flags[0] != "r" or name[:1] in (["[vvar]"], ["[vvar_vclock]"], ["[vsyscall]"], ["[vdso]"]):
                continue
            low, high = (int(end, 16) for end in span.split("-"))
            kind = "stack" if name == ["[stack]"] else "large" if high - low >= MIB else "tiny" if not name else "file"
            memory.seek(low)
            content = memory.read(high - low)
            for at in range(0, high - low, 4096):
                found[low + at] = kind, hashlib.blake2b(content[at : at + 4096], digest_size=16).digest()
    return found


def private_kib(pid) -> int:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private"))


def test_processes_found_stopped_stay_stopped(work, jobs):
    job = start(jobs, work, "stopped")
    _, child = rounds.descendants(job.pid)
    dump(jobs, job.pid, work / "img")
    at_dump = harness.numbers(work / "log")[-1]
    data = restored(jobs, work / "img")
    assert data["bytes_injected"] >= 32 * MIB
    rounds.goes_on(work / "log", at_dump, more=3)
    assert harness.state(child) == "T"
    os.kill(child, signal.SIGCONT)
    harness.wait_for(lambda: "DONE" in (work / "log").read_text(), "the stopped child checks its memory and ends")


def test_plain_gives_the_same(work, jobs):
    job = start(jobs, work, "private", 128)
    dump(jobs, job.pid, work / "img")
    at_dump = harness.numbers(work / "log")[-1]
    data = restored(jobs, work / "img", "--plain")
    assert (data["bytes_injected"], "inject" in data["seconds"]) == (0, False)
    assert data["bytes_by_criu"] > 60 * MIB
    rounds.goes_on(work / "log", at_dump, more=2)


def test_extracted_it_is_an_image_for_criu_alone(work, jobs):
    job = start(jobs, work, "tree", 48)
    dump(jobs, job.pid, work / "img")
    at_dump = harness.numbers(work / "log")[-1]
    said = gpuckpt("inspect", work / "img", "--extract", work / "plain")
    assert said.status == 0, said.error
    [command] = said.report["data"]["extracted"]["commands"]
    criu, _ = harness.criu_or_reason()
    argv = [criu, *shlex.split(command)[1:]]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    jobs.adopt(*(one["id"]["pid"] for one in rounds.manifest(work / "img")["tree"]["processes"]))
    rounds.goes_on(work / "log", at_dump, more=2)
    again = gpuckpt("inspect", work / "img", "--extract", work / "plain")
    assert (again.status, "exists" in again.error["message"]) == (20, True)


def test_wait_injects_too(work, jobs):
    job = start(jobs, work, "private", 96)
    dump(jobs, job.pid, work / "img")
    at_dump = harness.numbers(work / "log")[-1]
    run = start_gpuckpt("restore", work / "img", "--wait")
    jobs.adopt(job.pid, run.pid)
    rounds.goes_on(work / "log", at_dump, more=2)
    os.kill(job.pid, signal.SIGKILL)
    out, _ = run.communicate(timeout=30)
    assert run.returncode == 128 + signal.SIGKILL, out
    assert '"bytes_injected": 0' not in out


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_a_flipped_bit_is_found_before_anything_runs(work, jobs, share):
    job = start(jobs, work, "private", 256)
    pids = dump(jobs, job.pid, work / "img").report["data"]["pids"]
    log = (work / "log").read_bytes()
    pack = packing.flip(work / "img", share)
    answer = gpuckpt("restore", work / "img")
    assert (answer.status, answer.report["process"]) == (60, "untouched"), rounds.explain(answer)
    assert pack in answer.error["message"]
    time.sleep(0.3)
    assert (work / "log").read_bytes() == log
    assert_nothing_left(pids)
    verified = gpuckpt("inspect", work / "img", "--verify")
    assert verified.status == 60, verified.report["outcome"]


def assert_nothing_left(pids):
    harness.wait_for(lambda: not any(harness.alive(pid) for pid in pids), f"{pids} have ended", 10)
    assert not arena.runs_of(*pids)
    left = Path("/dev/shm").glob("gpuckpt-" + "[0-9a-f]" * 8)
    assert not [path for path in left if not (arena.RUNS / path.name.removeprefix("gpuckpt-")).exists()]


@pytest.mark.parametrize("victim", ["main", "owner"])
def test_killed_while_memory_is_written(work, jobs, victim):
    """Three times each: none of the tree is left, and the image restores afterwards."""
    job = start(jobs, work, "private", 1024)
    pids = dump(jobs, job.pid, work / "img").report["data"]["pids"]
    log = (work / "log").read_bytes()
    for delay in (0.0, 0.02, 0.04):
        run = start_gpuckpt("restore", work / "img")
        harness.wait_for(lambda run=run: arena.journal_has(run.pid, "held") or run.poll() is not None, "held")
        time.sleep(delay)
        assert arena.kill(run.pid if victim == "main" else arena.owner_of(run.pid))
        run.communicate(timeout=60)
        assert run.returncode == (40 if victim == "owner" else -signal.SIGKILL)
        harness.wait_for(lambda: arena.cleared_away(*pids), "the run is cleaned up", 20)
        assert_nothing_left(pids)
        assert (work / "log").read_bytes() == log
        harness.wait_for(lambda: not any(harness.state(pid) for pid in pids), f"{pids} are reaped", 20)
    data = restored(jobs, work / "img")
    rounds.goes_on(work / "log", harness.numbers(work / "log")[-1], more=2)
    assert data["bytes_injected"] > 300 * MIB


def test_an_interrupt_while_memory_is_written(work, jobs):
    job = start(jobs, work, "private", 768)
    pids = dump(jobs, job.pid, work / "img").report["data"]["pids"]
    run = start_gpuckpt("restore", work / "img")
    harness.wait_for(lambda: arena.journal_has(run.pid, "held"), "held")
    run.send_signal(signal.SIGTERM)
    out, _ = run.communicate(timeout=60)
    assert run.returncode == 128 + signal.SIGTERM, out
    assert_nothing_left(pids)


def test_a_gpu_program_is_injected(work, fake_gpu, start_fake_cuda_app):
    """All threads are held while memory is written, the restore thread too; then only that one runs, then all."""
    fake_gpu.configure(total=8 << 30)
    app = start_fake_cuda_app("--mib", "96", "--children", "1")
    app.wait_for_steps(3)
    before = app.checksum()
    assert gpuckpt("dump", "--tree", app.pid, work / "img", env=fake_gpu.variables).status == 0
    app.process.wait(10)
    packing.pack(work / "img")
    answer = gpuckpt("restore", work / "img", "--settle", 0.3, env=fake_gpu.variables)
    assert (answer.status, answer.report["process"]) == (0, "restored"), rounds.explain(answer)
    assert answer.report["data"]["bytes_injected"] > 90 * MIB
    assert {"criu", "inject", "host_to_gpu"} <= set(answer.report["data"]["seconds"])
    app.wait_for_steps(3)
    assert app.checksum() == before
    steps = app.steps()
    assert steps == list(range(steps[0], steps[0] + len(steps)))

"""Judgements of dumps that are easy to get wrong, each from something seen."""

import os
import stat
from dataclasses import replace
from pathlib import Path

import pytest
from cases_dump import CUDA_1000, CUDA_1010, NCCL_FILE, RANKS, SAFE, around, opened, root, two_ranks, unix
from checkfacts import (
    GIB,
    GPU0,
    LISTENING,
    NAMESPACES,
    OUTSIDE_TCP,
    STDOUT_PIPE,
    STDOUT_TTY,
    criu,
    driver,
    dump,
    file,
    gpu_dump,
    gpu_tree,
    host,
    judged,
    process,
    tree,
    verdict,
    with_socket,
)

from gpuckpt.checks import DUMP_CHECKS, MemoryLimit, chosen_files, needs_at_restore
from gpuckpt.checks.check import size, version
from gpuckpt.model.facts import GpuMapping, GpuUse, Socket, Stdio, Surroundings
from gpuckpt.model.requests import DumpRequest

UNREADABLE = driver(gpus=(replace(GPU0, memory_free_bytes=None),))


@pytest.mark.parametrize(
    ("text", "numbers"),
    [("6.18.5-generic", (6, 18, 5)), ("4.2", (4, 2)), ("6.1+", (6, 1)), (None, ()), ("", ()), ("v4.1", ())],
)
def test_versions(text, numbers):
    assert version(text) == numbers


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (17 * GIB, "17.0 GiB"), (1 << 42, "4.0 TiB")]
)
def test_sizes(count, text):
    assert size(count) == text


@pytest.mark.parametrize(
    ("kernel", "installed", "expected"),
    [
        ("6.12.9", "3.17.1", "pass"),
        ("6.13.0", "4.0", "fail"),
        ("6.13.0", "4.1", "pass"),
        ("5.10.0", "3.16", "fail"),
        ("7.0.0-rc1", "4.0", "fail"),
        ("strange", "4.2", "unknown"),
    ],
)
def test_criu_for_kernels(kernel, installed, expected):
    assert verdict("criu-kernel", dump(host=replace(criu(version=installed), kernel=kernel))) == expected


@pytest.mark.parametrize(
    ("kernel", "installed", "expected"),
    [("6.15.9", "4.1.1", "pass"), ("6.16.0", "4.1.1", "fail"), ("6.16.0", "4.2", "pass"), ("7.1", "4.1.1", "fail")],
)
@pytest.mark.parametrize("family", ["inet", "inet6", "packet"])
def test_criu_for_network_sockets(kernel, installed, expected, family):
    facts = dump(with_socket(replace(LISTENING, family=family)), host=replace(criu(version=installed), kernel=kernel))
    assert verdict("criu-inet", facts) == expected


def test_a_tree_without_network_sockets_needs_no_newer_criu():
    assert judged("criu-inet", dump(unix(), host=criu(version="4.1.1"))) is None


def test_criu_check_that_was_not_run_is_unknown():
    assert verdict("criu-works", dump(host=criu(check_ok=None))) == "unknown"


def test_root_without_all_capabilities_is_told_which():
    container = host(privileged=False, missing_capabilities=("CAP_SYS_ADMIN", "CAP_SYS_PTRACE"))
    assert judged("privilege", dump(host=container)).found == "without CAP_SYS_ADMIN, CAP_SYS_PTRACE"
    assert judged("privilege", dump(host=host(privileged=False))).found == "not root"


@pytest.mark.parametrize("zombie", [process(1010, state="Z"), process(1010, state="Z", namespaces={})])
def test_zombies_inside_the_tree_are_fine(zombie):
    assert verdict("alive", dump(tree(zombie))) == "pass"
    assert verdict("namespaces", dump(tree(zombie))) == "pass"


def test_gpuckpt_as_a_grandchild_is_inside():
    assert verdict("own-ancestor", dump(tree(process(77)))) == "fail"


def test_an_unknown_tracer_is_named_by_pid():
    assert "process 812" in judged("traced", root(tracer_pid=812)).found


def test_a_restored_tree_has_its_own_time_namespace_and_can_be_dumped_again():
    own = {**NAMESPACES, "time": "time:[4026532100]", "time_for_children": "time:[4026532100]"}
    assert verdict("namespaces", root(namespaces=own)) == "pass"
    assert verdict("container", root(namespaces=own)) == "pass"


def test_gpuckpt_inside_the_same_container():
    assert verdict("container", around(container_id="4f1e", container_runtime="docker")) == "pass"


@pytest.mark.parametrize(
    ("runtime", "command"), [("podman", "podman container checkpoint"), ("Docker", "docker checkpoint")]
)
def test_containers_name_the_runtime_to_use(runtime, command):
    job = tree(
        root_process=process(namespaces={**NAMESPACES, "pid": "pid:[1]"}),
        surroundings=Surroundings(container_id="4f1e", container_runtime=runtime),
    )
    assert command in judged("container", dump(job)).hint
    assert judged("namespaces", dump(job)) is None


def test_a_plan_says_what_a_restore_needs_of_files():
    log = file("/srv/job/log", flags=os.O_WRONLY | os.O_APPEND)
    data = file("/srv/job/data.db", flags=os.O_RDWR)
    read = file("/srv/job/input", flags=os.O_RDONLY)
    job = tree(files=(log, data, read))
    for asked, needed in (
        ({}, {log.path: "may-grow", data.path: "unchanged"}),
        ({"leave_running": True}, {log.path: "in-image", data.path: "in-image"}),
        ({"capture_files": ("*.db",)}, {log.path: "may-grow", data.path: "in-image"}),
    ):
        found = needs_at_restore(DumpRequest(pid=1000, image=Path("/srv/images/one"), **asked), job)
        assert {one["path"]: one["needed"] for one in found} == needed


def test_a_tree_that_gpuckpt_isolated_is_told_what_can_be_done():
    job = tree(
        root_process=process(namespaces={**NAMESPACES, "pid": "pid:[1]", "mnt": "mnt:[1]"}),
        surroundings=Surroundings(container_runtime="gpuckpt"),
    )
    assert judged("container", dump(job)).found == "namespaces that `gpuckpt restore` has made: mnt, pid"
    assert "without these" in judged("container", dump(job)).hint


def test_a_pid_namespace_without_a_known_runtime_is_a_container_too():
    assert verdict("container", root(namespaces={**NAMESPACES, "pid": "pid:[1]"})) == "fail"


def test_a_foreground_job_matters_only_to_the_gpu_hold():
    job = tree(root_process=process(foreground=True))
    assert judged("foreground", dump(job)) is None
    gpu_job = replace(gpu_tree(), processes=(process(foreground=True),))
    assert judged("foreground", dump(gpu_job)).severity == "warn"
    assert judged("foreground", dump(gpu_job, ask_leave_running=True)).blocks


@pytest.mark.parametrize(
    ("restart", "expected"), [("no", "pass"), ("on-success", "pass"), ("on-failure", "fail"), (None, "unknown")]
)
def test_systemd_restart(restart, expected):
    facts = around(systemd_unit="job.service", systemd_restart=restart)
    assert verdict("supervisor", facts) == expected
    assert judged("supervisor", replace(facts, request=replace(facts.request, leave_running=True))) is None


def test_scopes_are_never_started_again():
    assert verdict("supervisor", around(systemd_unit="session-3.scope")) == "pass"


def test_a_slurm_step_is_named():
    found = judged("supervisor", around(slurm_job_id="123", slurm_step_id="0"))
    assert "Slurm job 123, step 0" in found.found
    assert "scontrol update JobId=123" in found.hint


@pytest.mark.parametrize(
    "target", ["anon_inode:[timerfd]", "anon_inode:inotify", "pidfd:[42]", "anon_inode:[pidfd]", "net:[4026531840]"]
)
def test_kernel_objects_that_criu_saves(target):
    assert verdict("kernel-objects", opened("anon", target)) == "pass"


def test_kernel_objects():
    assert verdict("kernel-objects", opened("anon", "anon_inode:[new-thing]")) == "unknown"
    assert verdict("kernel-objects", opened("anon", "anon_inode:[io_uring]")) == "pass"
    assert verdict("kernel-objects", opened("anon", "/secretmem (deleted)")) == "fail"
    assert verdict("kernel-objects", dump(special_mappings=("1000 /secretmem (deleted)",))) == "fail"
    assert verdict("kernel-objects", dump(unix(family="vsock"))) == "fail"
    assert verdict("kernel-objects", dump(unix(family="unknown"))) == "unknown"


def test_devices_of_the_gpu_are_judged_elsewhere():
    assert verdict("devices", opened("device", "/dev/nvidia0")) == "pass"
    assert "NCCL_IB_DISABLE=1" in judged("devices", opened("device", "/dev/infiniband/uverbs0")).hint


def test_connections_inside_the_tree_need_no_decision():
    assert judged("tcp-outside", dump(with_socket(replace(OUTSIDE_TCP, inside=True)))) is None
    assert judged("tcp-outside", dump(with_socket(LISTENING))) is None


def test_stdio_on_an_outside_socket_is_no_outside_connection():
    journal = Stdio(1, "socket", "socket:[700]", ("1000 fd 1",), True, "812 systemd-journal")
    facts = dump(replace(unix(), outside_stdio=(journal,)))
    assert verdict("unix-outside", facts) == "pass"
    assert verdict("unix-outside", dump(unix(state="listen"))) == "pass"


def test_an_other_end_that_cannot_be_asked_for_is_unknown():
    assert verdict("unix-outside", dump(unix(peer_inode=0, peer=""))) == "unknown"
    assert verdict("unix-outside", dump(unix(state="unknown", peer_inode=0, peer=""))) == "unknown"


@pytest.mark.parametrize("state", ["closed", "unconnected", "listen"])
def test_a_tcp_socket_without_other_end_is_no_connection(state):
    assert judged("tcp-outside", dump(with_socket(replace(OUTSIDE_TCP, state=state)))) is None


@pytest.mark.parametrize("state", ["syn-sent", "fin-wait-2", "close-wait", "closing"])
def test_a_connection_that_begins_or_ends_is_one(state):
    assert verdict("tcp-outside", dump(with_socket(replace(OUTSIDE_TCP, state=state)))) == "fail"


def test_what_the_restore_will_need():
    hint = judged("stdio", dump(tree(outside_stdio=(STDOUT_PIPE, replace(STDOUT_PIPE, fd=2))))).hint
    assert "--stdout FILE --stderr FILE" in hint
    assert "--wait" in judged("stdio", dump(tree(outside_stdio=(STDOUT_TTY,)))).hint


def test_watches_that_could_not_be_read():
    assert judged("inotify", dump()) is None
    assert verdict("inotify", opened("anon", "anon_inode:inotify")) == "unknown"


@pytest.mark.parametrize(("mode", "expected"), [(0o1777, "pass"), (0o775, "fail"), (0o707, "fail"), (0o755, "pass")])
def test_directories_others_can_write_to(mode, expected):
    assert verdict("image-parent-safe", dump(image_parent_mode=stat.S_IFDIR | mode)) == expected


def test_disk_space_counts_everything():
    job = gpu_tree(files=(file("/tmp/gone", deleted=True, links=0, blocks_bytes=2 * GIB),))
    job = replace(job, processes=(process(rss_bytes=GIB, shared_bytes=GIB, swap_bytes=GIB),))
    need = int((2 + 2 + 16) * GIB * 1.1)
    assert verdict("disk-space", dump(job, image_space_bytes=need)) == "pass"
    assert verdict("disk-space", dump(job, image_space_bytes=need - 1)) == "fail"
    assert verdict("disk-space", dump(job, image_space_bytes=None)) == "unknown"
    assert verdict("disk-space", dump(replace(job, gpu_uses=()), image_space_bytes=need)) == "unknown"


def test_an_image_in_memory_lies_beside_the_copy_of_the_gpu_memory():
    """A tmpfs of 128 GiB on a host of 128 GiB has room for 60 GiB, and so has the host for a copy: not for both."""
    job = gpu_tree(gpu_uses=(GpuUse(1000, "GPU-aaaa", 60 * GIB),))
    here = replace(driver(), memory_available_bytes=124 * GIB)
    there = {"image_space_bytes": 128 * GIB, "host": here}
    assert verdict("gpu-copy-room", dump(job, **there)) == "pass"
    assert verdict("disk-space", dump(job, **there)) == "pass"
    found = judged("disk-space", dump(job, **there, image_in_memory=True))
    assert found.verdict == "fail"
    assert "64.0 GiB free in the host's memory" in found.found
    assert "beside the driver's copy" in found.found
    on_cpu = dump(image_space_bytes=500 * GIB, image_in_memory=True, host=host(memory_available_bytes=1 << 20))
    assert "1.0 MiB free in the host's memory, where it would lie" in judged("disk-space", on_cpu).found
    assert "GPU" not in judged("disk-space", on_cpu).found


def test_disk_space_with_a_base():
    job = tree(
        root_process=process(rss_bytes=4 * GIB), files=(file("/tmp/gone", deleted=True, links=0, blocks_bytes=GIB),)
    )
    full, with_half = int(5 * GIB * 1.1), int(3 * GIB * 1.1)
    for base, free, expected, severity in (
        (None, full - 1, "fail", "block"),
        (2 * GIB, full, "pass", "block"),
        (2 * GIB, full - 1, "fail", "warn"),
        (2 * GIB, with_half, "fail", "warn"),
        (2 * GIB, with_half - 1, "fail", "block"),
        (50 * GIB, int(GIB * 1.1), "fail", "warn"),
        (50 * GIB, int(GIB * 1.1) - 1, "fail", "block"),  # what no base holds: the deleted file
        (0, full - 1, "fail", "block"),
        (2 * GIB, None, "unknown", "block"),
    ):
        found = judged("disk-space", dump(job, image_space_bytes=free, base_bytes=base))
        assert (found.verdict, found.severity) == (expected, severity), (base, free, found)
        assert "None" not in found.expected
        assert ("base" in found.expected) == bool(base)


def test_gpu_checks_say_nothing_about_a_cpu_job():
    without = dump(host=driver(version=None, interface="none", gpus=(), mps=True))
    assert [check.id for check in DUMP_CHECKS if check.id.startswith(("gpu-", "nccl")) and check.judge(without)] == []


def test_gpu_files_in_a_tree_without_cuda():
    monitor = process(gpu_files=(GpuMapping("fd 9", "/dev/nvidiactl"),))
    assert verdict("gpu-files", dump(tree(root_process=monitor))) == "fail"


@pytest.mark.parametrize(("installed", "severity"), [("580.159.04", "block"), ("610.57", "block"), ("620.10", "note")])
def test_a_later_driver_is_asked_about_managed_memory(installed, severity):
    user = process(gpu_files=(GpuMapping("7f0000000000-7f0000800000", "/dev/nvidia-uvm", 8 << 20),))
    facts = dump(gpu_tree(processes=(user,)), host=driver(version=installed))
    found = next(check for check in DUMP_CHECKS if check.id == "gpu-managed").finding(facts, frozenset())
    assert (found.verdict, found.severity) == ("fail", severity)


def test_a_context_without_memory_counts_as_nothing():
    agent = gpu_tree(process(1010), cuda=(CUDA_1000, CUDA_1010))
    assert "16.2 GiB" in judged("gpu-copy-room", dump(agent)).expected


def test_unknown_gpu_memory_is_bounded_by_what_is_in_use():
    hidden = gpu_tree(gpu_uses=())
    assert verdict("gpu-copy-room", dump(hidden)) == "pass"
    assert verdict("gpu-copy-room", dump(hidden, memory_limits=(MemoryLimit("cgroup /", GIB),))) == "unknown"
    assert verdict("gpu-copy-room", dump(hidden, host=UNREADABLE)) == "unknown"


def test_a_limit_of_one_process_is_compared_with_its_own_memory():
    job = gpu_tree(process(1010), gpu_uses=(GpuUse(1000, "GPU-aaaa", 8 * GIB), GpuUse(1010, "GPU-bbbb", 40 * GIB)))
    roomy, narrow = MemoryLimit("RLIMIT_AS of 1000", 10 * GIB, 1000), MemoryLimit("RLIMIT_AS of 1010", 10 * GIB, 1010)
    assert verdict("gpu-copy-room", dump(job, memory_limits=(roomy,))) == "pass"
    assert "1010" in judged("gpu-copy-room", dump(job, memory_limits=(roomy, narrow))).found


def test_mig_slices_and_unread_gpus():
    assert verdict("gpu-mig", dump(gpu_tree(gpu_uses=(GpuUse(1000, "MIG-1", 1),)))) == "fail"
    assert verdict("gpu-mig", gpu_dump(host=driver(gpus=()))) == "unknown"


def test_arm_needs_a_newer_driver():
    facts = gpu_dump(host=replace(host(), machine="aarch64"))
    assert "595" in judged("gpu-features", facts).hint


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, "fail"),
        ({"NCCL_SHM_DISABLE": "1"}, "fail"),
        ({"NCCL_P2P_DISABLE": "1", "NCCL_CUMEM_ENABLE": "0"}, "fail"),
        ({"NCCL_P2P_DISABLE": "1", "NCCL_CUMEM_ENABLE": "0", "NCCL_CUMEM_HOST_ENABLE": "0"}, "pass"),
        (SAFE, "pass"),
        ({"NCCL_P2P_DISABLE": "0", "NCCL_SHM_DISABLE": "1"}, "fail"),
    ],
)
def test_nccl_settings_as_measured(environment, expected):
    assert verdict("nccl-sharing", two_ranks({1000: environment, 1010: environment})) == expected


def test_an_unread_nccl_environment_blocks():
    assert judged("nccl-sharing", two_ranks({1000: SAFE})).blocks
    assert judged("nccl-sharing", two_ranks(None)).blocks


def test_libnccl_alone_is_no_evidence():
    """PyTorch maps libnccl into every process; ranks that never met share nothing."""
    assert verdict("nccl-sharing", two_ranks({}, sockets=())) == "pass"
    alone = dump(gpu_tree(files=(NCCL_FILE,), sockets=RANKS))
    assert judged("nccl-sharing", alone) is None


def test_other_signs_of_ranks_that_met():
    own = Socket(3, "unix", "dgram", "unconnected", "@/tmp/nccl-socket-0-5f3a", "", ("1000 fd 40",))
    assert verdict("nccl-sharing", two_ranks({1000: {}, 1010: {}}, sockets=(own,))) == "fail"
    shared = file("/dev/shm/nccl-Xy12", uses=("1000 map", "1010 map"))
    job = gpu_tree(process(1010), cuda=(CUDA_1000, CUDA_1010), files=(NCCL_FILE, shared))
    assert verdict("nccl-sharing", dump(job, nccl_environment={1000: {}, 1010: {}})) == "fail"


def test_plain_cuda_works_with_older_drivers():
    old = driver(version="565.57.01", interface="program")
    assert verdict("gpu-features", gpu_dump(host=old)) == "pass"
    assert verdict("gpu-features", dump(gpu_tree(process(1010), cuda=(CUDA_1000, CUDA_1010)), host=old)) == "fail"


@pytest.mark.parametrize(
    ("entry", "parent", "words", "absent"),
    [
        (STDOUT_PIPE, 900, "812 systemd-journal stays behind and loses its writer; name the common parent", ""),
        (STDOUT_PIPE, 1, "loses its writer; else the restore will need --stdout FILE, or --wait", "--tree"),
        (replace(STDOUT_PIPE, fd=0, writable=False), 900, "loses its reader", "writer"),
        (replace(STDOUT_PIPE, kind="socket", peer=""), 1, "the process at the other end stays behind", "--tree"),
        (STDOUT_TTY, 900, "the job leaves its terminal when it ends; the restore will need --wait", "FILE"),
    ],
)
def test_streams_whose_other_end_stays_behind_are_a_warning(entry, parent, words, absent):
    job = tree(root_process=process(ppid=parent), outside_stdio=(entry,))
    found = judged("stdio", dump(job))
    assert (found.verdict, found.severity) == ("fail", "warn")
    assert words in found.hint
    assert not absent or absent not in found.hint
    stays = judged("stdio", dump(job, ask_leave_running=True))
    assert stays.severity == "note"
    assert stays.hint.startswith("nothing now; the restore will need ")


WRITTEN = file("/srv/job/log", flags=0o1)
APPENDED = file("/srv/job/append", flags=0o2001)
MAPPED = file("/srv/job/map", uses=("1000 map shared-write",))
READ = file("/srv/job/read", flags=0o0)
CODE = file("/usr/lib/x.so", uses=("1000 map", "1000 map exec"))
SET_ID = file("/srv/job/setuid", flags=0o2, mode=stat.S_IFREG | stat.S_ISUID | 0o755)
GONE = file("/srv/job/gone", flags=0o2, deleted=True)
KERNEL = file("/sys/kernel/mm/x", flags=0o2)
FILES = tree(files=(WRITTEN, APPENDED, MAPPED, READ, CODE, SET_ID, GONE, KERNEL))


@pytest.mark.parametrize(
    ("words", "leave_running", "names"),
    [
        ((), False, ""),
        ((), True, "append log map"),
        (("none",), True, ""),
        (("writable",), False, "append log map"),
        (("all",), False, "append log map read"),
        (("/srv/job/[lr]*",), False, "log read"),
        (("/srv/job/read", "writable"), True, "append log map read"),
        (("/srv/*",), False, "append log map read"),
        (("/usr/lib/x.so",), False, "x.so"),
    ],
)
def test_which_files_are_saved(words, leave_running, names):
    request = dump(FILES, ask_capture_files=words, ask_leave_running=leave_running).request
    found = chosen_files(request, FILES)
    assert " ".join(sorted(one.path.rpartition("/")[2] for one in found.files)) == names
    assert found.asked == bool(words)


def test_unasked_the_largest_are_left():
    small, large = replace(WRITTEN, size=GIB // 2), replace(MAPPED, size=GIB * 3 // 4)
    job = tree(files=(large, small))
    found = judged("left-files", dump(job, ask_leave_running=True))
    assert found.verdict == "fail"
    assert large.path in found.found and small.path not in found.found
    assert verdict("left-files", dump(job, ask_leave_running=True, ask_capture_files=("writable",))) == "pass"


def test_what_could_not_be_saved_is_named_with_the_reason():
    facts = dump(tree(files=(WRITTEN,)), ask_leave_running=True, not_captured={WRITTEN.path: "the disk is full"})
    assert "the disk is full" in judged("left-files", facts).found


def test_files_for_the_image_need_room():
    large = replace(WRITTEN, blocks_bytes=600 * GIB)
    assert verdict("disk-space", dump(tree(files=(large,)))) == "pass"
    assert verdict("disk-space", dump(tree(files=(large,)), ask_capture_files=("all",))) == "fail"


@pytest.mark.parametrize(
    ("word", "why", "severity"),
    [
        ("/srv/job/none", "no such file open", "block"),
        ("/srv/job/setuid", "setuid", "block"),
        ("/srv/job/gone", "deleted", "block"),
        ("/sys/kernel/mm/x", "no regular file", "block"),
        ("/etc/*", "no such file open", "warn"),
    ],
)
def test_what_cannot_be_saved_is_said(word, why, severity):
    found = judged("capture-files", dump(FILES, ask_capture_files=(word, "/srv/job/log")))
    assert (found.verdict, found.severity) == ("fail", severity)
    assert f"{word}: " in found.found and why in found.found

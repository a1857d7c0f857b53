import os
from pathlib import Path

import pytest

from gpuckpt.system import procfs
from gpuckpt.system.procfs import cgroups, host, surroundings

ID = "0123456789abcdef" * 4


@pytest.mark.parametrize(
    ("path", "unit", "container"),
    [
        ("/system.slice/train.service", "train.service", (None, None)),
        ("/user.slice/user-1000.slice/user@1000.service/app.slice/run-r1.scope", "run-r1.scope", (None, None)),
        ("/user.slice/user-0.slice/session-3.scope", "session-3.scope", (None, None)),
        (
            r"/system.slice/system-train\x2djob.slice/train\x2djob@a.service/sub",
            r"train\x2djob@a.service",
            (None, None),
        ),
        (f"/system.slice/docker-{ID}.scope", f"docker-{ID}.scope", (ID, "docker")),
        (f"/docker/{ID}", None, (ID, "docker")),
        (f"/machine.slice/libpod-{ID}.scope/container", f"libpod-{ID}.scope", (ID, "podman")),
        (
            f"/kubepods.slice/kubepods-pod1.slice/cri-containerd-{ID}.scope",
            f"cri-containerd-{ID}.scope",
            (ID, "containerd"),
        ),
        (f"/kubepods/burstable/pod1/{ID}", None, (ID, "unknown")),
        (f"/kubepods.slice/crio-{ID}.scope", f"crio-{ID}.scope", (ID, "cri-o")),
        ("/lxc.payload.web/system.slice/x.service", "x.service", ("web", "lxc")),
        ("/machine.slice/machine-web.scope/payload", "machine-web.scope", ("web", "systemd-nspawn")),
        (r"/machine.slice/machine-qemu\x2d1.scope", r"machine-qemu\x2d1.scope", (None, None)),
        ("/", None, (None, None)),
        ("/process_api/acbd29ef1aac9a30a9a33018ab9ff4db", None, (None, None)),
    ],
)
def test_units_and_containers(path, unit, container):
    assert surroundings.unit_in([path]) == unit
    assert surroundings.container_in([path]) == container


@pytest.mark.parametrize(
    ("path", "ids"),
    [
        ("/system.slice/slurmstepd.scope/job_4711/step_batch/user/task_0", ("4711", "batch")),
        ("/slurm/uid_1000/job_12/step_0/task_3", ("12", "0")),
        ("/system.slice/node_slurmstepd.scope/job_9", ("9", None)),
        ("/jenkins/job_12/step_1", (None, None)),
        ("/", (None, None)),
    ],
)
def test_slurm(path, ids):
    assert surroundings.slurm_in(["/", path]) == ids


def test_slurm_by_environment(programs, read):
    child = programs.start("ready(); forever()", env={"SLURM_JOB_ID": "77", "SLURM_STEP_ID": "2"})
    found = read(child).surroundings
    assert (found.slurm_job_id, found.slurm_step_id) == ("77", "2")
    assert read(programs.start("ready(); forever()")).surroundings.slurm_job_id is None


def test_membership_of_both_versions():
    text = "4:memory:/a:b/c\n3:cpu,cpuacct:/a\n1:name=systemd:/\n0::/deep\n"
    groups = cgroups.parse_membership(text)
    assert groups[0] == cgroups.Membership(("memory",), "/a:b/c")
    assert groups[1].controllers == ("cpu", "cpuacct")
    assert cgroups.unified_path(groups) == "/deep"
    assert cgroups.main_path(groups) == "/deep"
    assert cgroups.main_path(cgroups.parse_membership("4:memory:/a/b\n0::/\n")) == "/a/b"
    assert cgroups.main_path(cgroups.parse_membership("0::/\n")) == "/"
    assert cgroups.main_path(()) == ""
    assert cgroups.unified_path(cgroups.parse_membership("4:memory:/a\n")) is None


def test_mounts():
    text = (
        "35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n"
        "36 31 0:33 /docker/x /mnt/with\\040blank ro,relatime shared:9 master:3 - cgroup2 cgroup2 rw,nsdelegate\n"
        "31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755\n"
    )
    memory, unified = cgroups.parse_cgroup_mounts(text)
    assert (memory.kind, memory.mount_point) == ("cgroup", "/sys/fs/cgroup/memory")
    assert "memory" in memory.options
    assert memory.directory("/a/b") == "/sys/fs/cgroup/memory/a/b"
    assert memory.directory("/") == "/sys/fs/cgroup/memory"
    assert (unified.kind, unified.mount_point) == ("cgroup2", "/mnt/with blank")
    assert unified.directory("/docker/x/y") == "/mnt/with blank/y"
    assert unified.directory("/docker/xy") is None


@pytest.fixture
def memory_cgroup():
    """A cgroup v1 or v2 in which memory is limited, with a child cgroup that has a wider limit."""
    mounts = [mount for mount in cgroups.cgroup_mounts() if os.access(mount.mount_point, os.W_OK)]
    v1 = next((mount for mount in mounts if mount.kind == "cgroup" and "memory" in mount.options), None)
    v2 = next((mount for mount in mounts if mount.kind == "cgroup2"), None)
    if v1:
        top, limit = Path(v1.mount_point), "memory.limit_in_bytes"
    elif v2 and "memory" in (Path(v2.mount_point) / "cgroup.subtree_control").read_text():
        top, limit = Path(v2.mount_point), "memory.max"
    else:
        pytest.skip("no writable memory cgroup here")
    outer = top / f"gpuckpt-test-{os.getpid()}"
    inner = outer / "inner"
    inner.mkdir(parents=True)
    if limit == "memory.max":
        (outer / "cgroup.subtree_control").write_text("+memory")
    (outer / limit).write_text(str(300 << 20))
    (inner / limit).write_text(str(200 << 20))
    (outer / limit).write_text(str(100 << 20)) if limit == "memory.max" else None
    yield inner, (100 if limit == "memory.max" else 200) << 20
    inner.rmdir()
    outer.rmdir()


def test_the_smallest_limit_of_all_ancestors(programs, read, memory_cgroup):
    directory, smallest = memory_cgroup
    child = programs.start("ready(); forever()")
    before = read(child).surroundings.cgroup_memory_limit_bytes
    (directory / "cgroup.procs").write_text(str(child.pid))
    try:
        assert read(child).surroundings.cgroup_memory_limit_bytes == smallest
        assert before is None or before > smallest
        limits = procfs.memory_limits(child.pid)
        assert limits[0].directory == str(directory)
        assert limits[0].limit_bytes == 200 << 20
        assert limits[0].used_bytes is not None
        assert any(limit.directory == str(directory.parent) for limit in limits)
        assert procfs.pids_in_cgroup(str(directory)) == [child.pid]
        assert procfs.pids_in_cgroup(str(directory.parent)) == [child.pid]
        assert procfs.cgroup_of(child.pid).endswith(f"gpuckpt-test-{os.getpid()}/inner")
    finally:
        programs.stop()
    assert procfs.pids_in_cgroup(str(directory)) == []
    assert procfs.pids_in_cgroup("/no/such/cgroup") == []


def test_unified_cgroup(programs):
    mount = procfs.cgroup2_mount()
    if mount is None or not os.access(mount, os.W_OK):
        pytest.skip("no writable cgroup v2 here")
    assert (Path(mount) / "cgroup.procs").exists()
    child = programs.start("ready(); forever()")
    group = Path(mount) / f"gpuckpt-test-{os.getpid()}"
    group.mkdir()
    try:
        (group / "cgroup.procs").write_text(str(child.pid))
        assert procfs.unified_cgroup_of(child.pid).endswith(group.name)
        assert procfs.pids_in_cgroup(str(group)) == [child.pid]
        assert procfs.cgroup_kind() in {"systemd", "v2"}
    finally:
        programs.stop()
        group.rmdir()


@pytest.mark.parametrize(
    ("number", "device"), [(0x8803, os.makedev(136, 3)), (0x0401, os.makedev(4, 1)), (0x108801, os.makedev(136, 257))]
)
def test_terminal_numbers(number, device):
    assert surroundings.tty_device(number) == device


def test_this_host():
    pieces = procfs.read_host_pieces()
    name = os.uname()
    assert (pieces.hostname, pieces.kernel, pieces.machine) == (name.nodename, name.release, name.machine)
    assert 0 < pieces.memory_available_bytes <= pieces.memory_total_bytes
    assert pieces.memory_total_bytes == pytest.approx(
        os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), rel=0.01
    )
    assert pieces.cpu.cores == os.cpu_count()
    assert pieces.cpu.flags
    assert pieces.uptime_seconds > 0
    assert pieces.glibc is None or pieces.glibc.startswith("2.")
    assert pieces.transparent_huge_pages in {"always", "madvise", "never", None}


def test_privilege_is_seen_from_within():
    pid = os.fork()
    if pid == 0:
        try:
            os.setresuid(12, 12, 12)
            pieces = host.read_host_pieces()
            right = not pieces.privileged and "CAP_SYS_PTRACE" in pieces.missing_capabilities
            os._exit(0 if right else 3)
        except BaseException:
            os._exit(4)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_parsers_of_host_facts():
    x86 = "processor\t: 0\nvendor_id\t: GenuineIntel\nmodel name\t: Xeon: fast\nflags\t\t: sse fpu avx\n\nprocessor\t: 1\n"
    assert host.parse_cpu(x86, 2) == host.Cpu("Xeon: fast", "GenuineIntel", ("avx", "fpu", "sse"), 2)
    arm = "processor\t: 0\nFeatures\t: fp asimd\nCPU implementer\t: 0x41\nCPU part\t: 0xd4f\n"
    assert host.parse_cpu(arm, 72) == host.Cpu("0xd4f", "0x41", ("asimd", "fp"), 72)
    assert host.parse_memory("MemTotal:       24684092 kB\nMemFree: 1 kB\nMemAvailable:   24223442 kB\n") == (
        24684092 * 1024,
        24223442 * 1024,
    )

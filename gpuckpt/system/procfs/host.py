"""What the host itself is, and what this process may do on it."""

from __future__ import annotations

import os
import sys
from typing import Literal

from gpuckpt.model.facts import Cpu
from gpuckpt.model.records import dataclass
from gpuckpt.system import hostsettings
from gpuckpt.system.procfs.cgroups import cgroup2_mount
from gpuckpt.system.procfs.reading import comm_of, exists, read_text, status_of

CAPABILITIES = {
    "CAP_CHOWN": 0,
    "CAP_DAC_OVERRIDE": 1,
    "CAP_FOWNER": 3,
    "CAP_KILL": 5,
    "CAP_SETGID": 6,
    "CAP_SETUID": 7,
    "CAP_SETPCAP": 8,
    "CAP_NET_ADMIN": 12,
    "CAP_SYS_CHROOT": 18,
    "CAP_SYS_PTRACE": 19,
    "CAP_SYS_ADMIN": 21,
}
"""What CRIU and the hold cannot do without (numbers of include/uapi/linux/capability.h).

CAP_SYS_RESOURCE is not among them: a tree of our own uid can do without (limits, oom_score_adj), see below.
"""
SYS_RESOURCE = 24


@dataclass(frozen=True, slots=True)
class HostPieces:
    """The part of model.facts.Host that is read here, under the same names."""

    hostname: str
    kernel: str
    machine: str
    os: str
    glibc: str | None
    cpu: Cpu
    memory_total_bytes: int
    memory_available_bytes: int
    privileged: bool
    missing_capabilities: tuple[str, ...]
    cgroup: Literal["systemd", "v2", "none"]
    python: str
    uptime_seconds: float
    transparent_huge_pages: str | None


def read_host_pieces() -> HostPieces:
    """Read them all, now."""
    name = os.uname()
    total, available = memory()
    missing = missing_capabilities()
    return HostPieces(
        hostname=name.nodename,
        kernel=name.release,
        machine=name.machine,
        os=os_name(),
        glibc=glibc_version(),
        cpu=cpu(),
        memory_total_bytes=total,
        memory_available_bytes=available,
        privileged=os.geteuid() == 0 and not missing,
        missing_capabilities=missing,
        cgroup=cgroup_kind(),
        python=sys.version.split(maxsplit=1)[0],
        uptime_seconds=uptime_seconds(),
        transparent_huge_pages=transparent_huge_pages(),
    )


def cpu() -> Cpu:
    """The first processor's model and features, and how many processors are online."""
    return parse_cpu(read_text("/proc/cpuinfo") or "", os.cpu_count() or 1)


def parse_cpu(cpuinfo: str, cores: int) -> Cpu:
    """Parse /proc/cpuinfo of x86 ('flags') or Arm ('Features', no model name)."""
    lines = (line.partition(":") for line in cpuinfo.partition("\n\n")[0].split("\n"))
    values = {name.strip(): value.strip() for name, _, value in lines}
    flags = values.get("flags") or values.get("Features", "")
    return Cpu(
        model=values.get("model name") or values.get("CPU part", ""),
        vendor=values.get("vendor_id") or values.get("CPU implementer", ""),
        flags=tuple(sorted(flags.split())),
        cores=cores,
    )


def memory() -> tuple[int, int]:
    """(total, available) bytes of the host's memory."""
    return parse_memory(read_text("/proc/meminfo") or "")


def parse_memory(meminfo: str) -> tuple[int, int]:
    """(MemTotal, MemAvailable) of /proc/meminfo in bytes."""
    lines = (line.split() for line in meminfo.split("\n"))
    values = {columns[0]: int(columns[1]) * 1024 for columns in lines if len(columns) > 1}
    return values.get("MemTotal:", 0), values.get("MemAvailable:", 0)


def os_name() -> str:
    """The distribution's own name for itself, 'Debian GNU/Linux 12 (bookworm)'; 'Linux' when it has none."""
    for path in ("/etc/os-release", "/usr/lib/os-release"):
        for line in (read_text(path) or "").split("\n"):
            name, _, value = line.partition("=")
            if name == "PRETTY_NAME":
                return value.strip("\"'")
    return "Linux"


def glibc_version() -> str | None:
    """'2.36', or None on another C library."""
    try:
        name = os.confstr("CS_GNU_LIBC_VERSION") or ""
    except (ValueError, OSError):
        return None
    return name.rpartition(" ")[2] or None


def missing_capabilities() -> tuple[str, ...]:
    """Which of the capabilities a dump and a restore need this process lacks."""
    held = _effective_capabilities()
    return tuple(name for name, bit in CAPABILITIES.items() if not held >> bit & 1)


def lacks_resource_capability() -> bool:
    """Without CAP_SYS_RESOURCE nobody may read or set the limits of another user's process (prlimit)."""
    return not _effective_capabilities() >> SYS_RESOURCE & 1


def _effective_capabilities() -> int:
    return int((status_of(os.getpid()) or {}).get("CapEff", "0"), 16)


def uptime_seconds() -> float:
    """Seconds since boot."""
    return float((read_text("/proc/uptime") or "0").split()[0])


def transparent_huge_pages() -> str | None:
    """'always', 'madvise' or 'never'; None where the kernel has none."""
    try:
        return hostsettings.read(hostsettings.HUGE_PAGES) or None
    except OSError:
        return None


def cgroup_kind() -> Literal["systemd", "v2", "none"]:
    """How a restored tree can get a cgroup of its own: from systemd, by a directory in cgroup v2, or not."""
    if exists("/run/systemd/system") and comm_of(1) == "systemd":
        return "systemd"
    mount = cgroup2_mount()
    return "v2" if mount is not None and os.access(mount, os.W_OK) else "none"

"""Giving up root for good: a process that reads what another host sends keeps only the directories it works in.

It becomes `nobody`, without groups and capabilities, and files alone still see root in it (setfsuid(2)): what root
owns it opens and makes as before, what root does not own is closed to it. Landlock then leaves it the directories that
were named, a filter of system calls what Landlock does not judge: modes, owners, times, sockets, other processes.

Not the user behind sudo: what that user may reach is no business of a transfer either, and ssh, which needs it, is
started by a process that has kept its rights (system/apart.py).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import stat
import struct
import sys
import time
from pathlib import Path

from gpuckpt.model.records import dataclass
from gpuckpt.system import procfs, syscallfilter

NOBODY = 65534
"""The uid and gid that the kernel itself shows for who has none here (/proc/sys/kernel/overflowuid)."""

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_KEEPCAPS, PR_CAPBSET_DROP = 1, 4, 8, 24
PR_SET_NO_NEW_PRIVS, PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL = 38, 47, 4
CAP_DAC_READ_SEARCH, CAP_SETGID, CAP_SETUID = 2, 6, 7
LAST_CAPABILITY = 63
CAPABILITY_VERSION_3 = 0x20080522
SYS_CAPGET, SYS_CAPSET, SYS_CREATE_RULESET, SYS_ADD_RULE, SYS_RESTRICT_SELF = 125, 126, 444, 445, 446

EXECUTE, WRITE_FILE, READ_FILE, READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
REMOVE_DIR, REMOVE_FILE, MAKE_DIR, MAKE_REG, MAKE_SYM = 1 << 4, 1 << 5, 1 << 7, 1 << 8, 1 << 12
REFER, TRUNCATE, IOCTL_DEV = 1 << 13, 1 << 14, 1 << 15
READING = READ_FILE | READ_DIR
RUNNING = READING | EXECUTE
WRITING = READING | WRITE_FILE | REMOVE_DIR | REMOVE_FILE | MAKE_DIR | MAKE_REG | MAKE_SYM | REFER | TRUNCATE
OF_FILES = EXECUTE | WRITE_FILE | READ_FILE | TRUNCATE | IOCTL_DEV
"""What Landlock can be told of a single file; the rest is of directories."""

OLDEST_ABI = 2
"""The first that lets a pack of an older image be linked (REFER)."""
TRUNCATE_ABI, TCP_ABI, IOCTL_ABI, SCOPE_ABI = 3, 4, 5, 6
BIND_AND_CONNECT, SIGNALS_AND_ABSTRACT_SOCKETS = 3, 3

THREAD_SECONDS = 5.0
"""A thread that has been waited for may take a moment to be gone from the kernel."""

SYSTEM = ("/usr", "/lib", "/lib64", "/bin")
FOR_PROGRAMS = (
    "/etc/ld.so.cache",
    "/etc/nsswitch.conf",
    "/etc/passwd",
    "/etc/group",
    "/etc/localtime",
    "/etc/ssl/openssl.cnf",
    "/etc/terminfo",
)

_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True)
class Keep:
    """What a confined process may reach of the file system, besides what Python itself reads."""

    writes: tuple[Path, ...] = ()
    """Directories beneath which it reads, makes and removes."""
    reads: tuple[Path, ...] = ()
    """Files, and directories beneath which it reads."""

    def covers(self, other: Keep) -> bool:
        """Whether nothing of the other lies outside of it."""
        read = _all_beneath(other.reads, (*self.reads, *self.writes))
        return read and _all_beneath(other.writes, self.writes)


def _all_beneath(paths: tuple[Path, ...], places: tuple[Path, ...]) -> bool:
    return all(any(path.is_relative_to(place) for place in places) for path in paths)


def confine(keep: Keep) -> tuple[str, ...]:
    """Give up root in this process, which has one thread, for good. What is not there cannot be reached later.

    Returns what this host could not do, in words: the rest holds. Raises RuntimeError where there are other threads:
    they would keep what this one gives up.
    """
    _require_one_thread()
    rules = _rules(keep)
    capabilities = 1 << CAP_DAC_READ_SEARCH if any(_needs_search(path) for path, _ in rules) else 0
    ruleset = _ruleset(rules)
    missing = []
    if not _become_nobody(capabilities):
        missing.append("root may not become nobody here")
    _prctl(PR_SET_NO_NEW_PRIVS, 1)
    if ruleset is None:
        missing.append("the kernel has no Landlock, which Linux from 5.19 on has")
    else:
        _checked(_libc.syscall(SYS_RESTRICT_SELF, ruleset, 0))
        os.close(ruleset)
    if not syscallfilter.install():
        missing.append("the kernel has no filters of system calls")
    return tuple(f"what reads the network is confined less: {why}" for why in missing)


def end_with_parent(parent: int) -> None:
    """SIGKILL for this process when the thread ends that has started it; to be called after `confine`, which undoes it.

    Raises ProcessLookupError where `parent` has gone already.
    """
    _prctl(PR_SET_PDEATHSIG, 9)
    if os.getppid() != parent:
        raise ProcessLookupError(parent)


def _require_one_thread() -> None:
    until = time.monotonic() + THREAD_SECONDS
    while len(threads := procfs.threads(os.getpid())) > 1:
        if time.monotonic() > until:
            raise RuntimeError(f"threads {threads} would not be confined")
        time.sleep(0.001)


def _rules(keep: Keep) -> list[tuple[Path, int]]:
    """Every path that stays reachable, with what may be done beneath it."""
    prefixes = {sys.prefix, sys.exec_prefix, sys.base_prefix, sys.base_exec_prefix} - {"/"}
    packages = {path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")}
    own = {str(Path(__file__).parents[1]), str(Path(os.__file__).parent)}
    wanted = [
        *((Path(path), RUNNING) for path in (*SYSTEM, *prefixes, *packages, *own)),
        *((Path(path), READING) for path in (*FOR_PROGRAMS, procfs.own_place())),
        (Path("/dev/null"), READ_FILE | WRITE_FILE),
        *((path, READING) for path in keep.reads),
        *((path, WRITING) for path in keep.writes),
    ]
    # os.path: a root without capabilities may not get there even now.
    return [(path, rights) for path, rights in wanted if os.path.exists(path)]  # noqa: PTH110


def _needs_search(path: Path) -> bool:
    """Whether root without capabilities does not get there: a directory on the way is another user's alone."""
    place = Path(os.path.realpath(path))
    return any(not _lets_root(step, stat.S_IXUSR) for step in place.parents) or not _lets_root(place, stat.S_IRUSR)


def _lets_root(place: Path, bit: int) -> bool:
    seen = place.stat()
    shift = 0 if seen.st_uid == 0 else 3 if seen.st_gid == 0 else 6
    return bool(seen.st_mode & (bit >> shift))


def _ruleset(rules: list[tuple[Path, int]]) -> int | None:
    """Landlock's rules as a descriptor; None where the kernel has no Landlock, or one that is too old."""
    abi = int(_libc.syscall(SYS_CREATE_RULESET, None, ctypes.c_size_t(0), 1))
    if abi < OLDEST_ABI:
        return None
    newest = IOCTL_DEV if abi >= IOCTL_ABI else TRUNCATE if abi >= TRUNCATE_ABI else REFER
    handled = (newest << 1) - 1
    # No rule for TCP: none is needed, for ssh is another process.
    attributes = struct.pack(
        "=QQQ",
        handled,
        BIND_AND_CONNECT if abi >= TCP_ABI else 0,
        SIGNALS_AND_ABSTRACT_SOCKETS if abi >= SCOPE_ABI else 0,
    )
    size = 24 if abi >= SCOPE_ABI else 16 if abi >= TCP_ABI else 8
    ruleset = _checked(_libc.syscall(SYS_CREATE_RULESET, attributes, ctypes.c_size_t(size), 0))
    for path, rights in rules:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
        try:
            mask = handled if path.is_dir() else handled & OF_FILES
            rule = struct.pack("=Qi", rights & mask, descriptor)
            _checked(_libc.syscall(SYS_ADD_RULE, ruleset, 1, rule, 0))
        finally:
            os.close(descriptor)
    return ruleset


def _become_nobody(capabilities: int) -> bool:
    """Another user to everything but files, with these capabilities alone. False where it stays root, without more."""
    _empty_bounds()
    _prctl(PR_SET_KEEPCAPS, 1)
    with contextlib.suppress(OSError):  # a container may lack the capability, or the user
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    became = os.geteuid() == NOBODY
    if became:
        # The change has emptied the effective set, and files see nobody: that alone is taken back.
        _set_capabilities(1 << CAP_SETUID | 1 << CAP_SETGID | capabilities, 1 << CAP_SETUID | 1 << CAP_SETGID)
    _libc.setfsgid(0)
    _libc.setfsuid(0)
    _set_capabilities(capabilities & _permitted(), capabilities & _permitted())
    # Whoever else is nobody must not trace a process for which files take root.
    _prctl(PR_SET_DUMPABLE, 0)
    return became


def _empty_bounds() -> None:
    """No program started from here on can gain a capability."""
    for number in range(LAST_CAPABILITY + 1):
        _libc.prctl(PR_CAPBSET_DROP, number, 0, 0, 0)  # EINVAL: the kernel has no such capability
    _libc.prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)


def _permitted() -> int:
    found = ctypes.create_string_buffer(24)
    _checked(_libc.syscall(SYS_CAPGET, struct.pack("=Ii", CAPABILITY_VERSION_3, 0), found))
    return int(struct.unpack("=6I", found.raw)[1])


def _set_capabilities(permitted: int, effective: int) -> None:
    header = struct.pack("=Ii", CAPABILITY_VERSION_3, 0)
    halves = [(effective >> shift & 0xFFFFFFFF, permitted >> shift & 0xFFFFFFFF, 0) for shift in (0, 32)]
    _checked(_libc.syscall(SYS_CAPSET, header, b"".join(struct.pack("=III", *half) for half in halves)))


def _prctl(option: int, value: int) -> None:
    _checked(_libc.prctl(option, value, 0, 0, 0))


def _checked(result: int) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result

"""A filter of system calls (seccomp(2)) for a confined process: what Landlock does not judge is refused here.

Files take a confined process for root (system/confinement.py), so it could change the mode, owner, times and attributes
of whatever root owns, and talk to each socket that root may talk to. Neither is needed in a transfer.
"""

from __future__ import annotations

import ctypes
import errno
import struct

SYS_SECCOMP, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_SPEC_ALLOW = 317, 1, 4
AUDIT_ARCH_X86_64 = 0xC000003E
KILL_PROCESS, ERRNO, ALLOW = 0x80000000, 0x00050000, 0x7FFF0000
LOAD, EQUAL, AT_LEAST, RETURN = 0x20, 0x15, 0x35, 0x06
"""Instructions of classic BPF: a word of what the filter is told; jumps; the verdict."""
AT_NUMBER, AT_ARCHITECTURE = 0, 4

REFUSED = {
    "modes": (90, 91, 268, 452),  # chmod fchmod fchmodat fchmodat2
    "owners": (92, 93, 94, 260),  # chown fchown lchown fchownat
    "attributes": (188, 189, 190, 197, 198, 199),  # setxattr removexattr, with their l and f
    "times": (132, 235, 261, 280),  # utime utimes futimesat utimensat
    "lengths by name": (76,),  # truncate: Landlock judges it from its third version on
    # The streams it has were given to it. With a new socket it could be heard as root where the file's mode decides.
    "sockets": (41, 53),  # socket socketpair
    "other processes": (101, 310, 311, 438),  # ptrace process_vm_readv process_vm_writev pidfd_getfd
    "files by handle": (304,),  # open_by_handle_at
    "name spaces and mounts": (155, 161, 165, 166, 272, 308, 428, 429, 430, 431, 432, 433, 442),
    "keys": (248, 249, 250),  # add_key request_key keyctl
    "what has often been a way out": (298, 321, 323, 425),  # perf_event_open bpf userfaultfd io_uring_setup
}
"""Numbers of x86-64, the only machine that gpuckpt runs on."""

FIRST_UNKNOWN = 463
"""setxattrat(2); calls from here on are newer than this list: programs take them for not there yet."""

_libc = ctypes.CDLL(None, use_errno=True)


def install() -> bool:
    """Put it over this thread and all it starts, for good; no_new_privs must be set. False where there is none."""
    program = _program()
    code = ctypes.create_string_buffer(program)
    head = struct.pack("=H6xQ", len(program) // 8, ctypes.addressof(code))
    flags = SECCOMP_FILTER_FLAG_SPEC_ALLOW  # without it old kernels turn on what costs a third of the speed
    return bool(_libc.syscall(SYS_SECCOMP, SECCOMP_SET_MODE_FILTER, flags, head) == 0)


def _program() -> bytes:
    numbers = sorted(number for group in REFUSED.values() for number in group)
    tests = [_step(EQUAL, number, len(numbers) - place, 0) for place, number in enumerate(numbers)]
    return b"".join(
        [
            _step(LOAD, AT_ARCHITECTURE),
            _step(EQUAL, AUDIT_ARCH_X86_64, 1, 0),
            _step(RETURN, KILL_PROCESS),
            _step(LOAD, AT_NUMBER),
            # x32's numbers, too: they begin at 1 << 30.
            _step(AT_LEAST, FIRST_UNKNOWN, len(tests) + 2, 0),
            *tests,
            _step(RETURN, ALLOW),
            _step(RETURN, ERRNO | errno.EPERM),
            _step(RETURN, ERRNO | errno.ENOSYS),
        ]
    )


def _step(code: int, value: int, when_true: int = 0, when_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, when_true, when_false, value)

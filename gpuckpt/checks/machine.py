"""Checks of the machine itself, the same for dump and restore: privilege, CRIU, CPU, kernel."""

from __future__ import annotations

from gpuckpt.checks.check import Check, Judgement, failed, listing, none_of, passed, unknown, version
from gpuckpt.checks.facts import DumpFacts, HasHost, RestoreFacts, is_connection, is_inet, outside_connections
from gpuckpt.model.facts import Cpu

OLDEST_CRIU = "3.17"
"""Older ones cannot restore programs of glibc >= 2.35 (https://github.com/checkpoint-restore/criu/issues/1696)."""
CRIU_FOR_KERNEL = (("6.13", "4.1"),)
"""Kernel from -> oldest CRIU. 6.13 split the vvar mapping (https://github.com/checkpoint-restore/criu/issues/2532)."""
INET_KERNEL, INET_CRIU = "6.16", "4.2"
"""6.16 limits SO_PASSCRED to unix and netlink sockets (https://github.com/checkpoint-restore/criu/issues/2718)."""

GET_CRIU = (
    "install CRIU 4.2 or newer (package `criu`; a copy in /opt/gpuckpt/criu is found by itself), "
    "or name one in GPUCKPT_CRIU"
)

# Flags of /proc/cpuinfo that a program can have chosen its code by. The rest describe the kernel (mitigations,
# topology) or only speed (erms, fsrm): their absence harms nothing.
_X86_PREFIXES = ("sse", "ssse", "avx", "amx", "sha", "3dnow")
_X86_WORDS = """
abm adx aes bmi1 bmi2 cldemote clflush clflushopt clwb clzero cmov cx16 cx8 enqcmd f16c fma fma4 fsgsbase fxsr gfni hle
lahf_lm mmx mmxext monitorx movbe movdir64b movdiri mwaitx ospke pclmulqdq pku popcnt ptwrite rdpid rdrand rdseed rtm
serialize sm3 sm4 tbm tsxldtrk uintr user_shstk vaes vpclmulqdq waitpkg xop xsave xsavec xsaveopt xgetbv1
"""
_X86_FLAGS = frozenset(_X86_WORDS.split())


def _privilege(facts: HasHost) -> Judgement:
    expected = "root, with the capabilities that CRIU needs"
    missing = facts.host.missing_capabilities
    if facts.host.privileged and not missing:
        return passed(expected, "root")
    found = f"without {', '.join(missing)}" if missing else "not root"
    hint = "run it as root: sudo gpuckpt ...; a root that lacks them is in a container: run it on the host itself"
    return failed(expected, found, hint)


def _dump_privilege(facts: DumpFacts) -> Judgement:
    judgement = _privilege(facts)
    others = sorted({process.uid for process in facts.tree.processes if process.uid != facts.own_uid})
    if judgement.verdict != "pass" or not others or not facts.lacks_resource_capability:
        return judgement
    users = listing(str(uid) for uid in others)
    hint = "run it on the host itself, or in a container with --cap-add SYS_RESOURCE"
    return failed(judgement.expected, f"without CAP_SYS_RESOURCE, and the tree has processes of user {users}", hint)


def _criu_present(facts: HasHost) -> Judgement:
    criu = facts.host.criu
    if criu.path is None:
        return failed("CRIU on this host", criu.problem or "no program `criu` was found", GET_CRIU)
    if not version(criu.version):
        return failed("CRIU that starts", f"{criu.path}: {criu.problem or 'it does not say its version'}", GET_CRIU)
    return passed("CRIU on this host", f"{criu.path}, version {criu.version}")


def _criu_works(facts: HasHost) -> Judgement | None:
    criu = facts.host.criu
    if criu.path is None:
        return None
    expected = "`criu check` succeeds"
    if criu.check_ok:
        return passed(expected, "it does")
    if criu.check_ok is None:
        hint = f"run `{criu.path} check` as root and look at what it says"
        return unknown(expected, criu.problem or "it was not run", hint)
    words = first_error(criu.check_output) or criu.problem or "it fails without a word"
    return failed(expected, words, f"{GET_CRIU}; `{criu.path} check` must succeed")


def first_error(output: str) -> str:
    """The first line that names an error, else the first line."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return next((line for line in lines if "Error" in line), lines[0] if lines else "")


def oldest_criu(kernel: str) -> str:
    """The oldest CRIU that starts on a kernel."""
    fitting = [criu for first, criu in CRIU_FOR_KERNEL if version(kernel)[:2] >= version(first)]
    return fitting[-1] if fitting else OLDEST_CRIU


def _criu_kernel(facts: HasHost) -> Judgement | None:
    criu, kernel = facts.host.criu.version, facts.host.kernel
    if not version(criu):
        return None
    if not version(kernel):
        return unknown("CRIU new enough for the kernel", f"kernel {kernel!r}", GET_CRIU)
    oldest = oldest_criu(kernel)
    expected = f"CRIU {oldest} or newer on kernel {kernel}"
    if version(criu) >= version(oldest):
        return passed(expected, f"CRIU {criu}")
    return failed(expected, f"CRIU {criu}", f"CRIU {criu} cannot work on this kernel: {GET_CRIU}")


def _criu_inet(facts: DumpFacts) -> Judgement | None:
    criu, kernel = facts.host.criu.version, facts.host.kernel
    owners = [owner for s in facts.tree.sockets if is_inet(s) or s.family == "packet" for owner in s.owners]
    if not owners or not version(criu):
        return None
    expected = f"CRIU {INET_CRIU} or newer, for network sockets on kernel {kernel}"
    if version(criu) >= version(INET_CRIU) or version(kernel)[:2] < version(INET_KERNEL):
        return passed(expected, f"CRIU {criu}")
    return failed(expected, f"CRIU {criu}, and network sockets at {listing(owners)}", GET_CRIU)


def _network_lock(facts: DumpFacts) -> Judgement | None:
    if not any(is_connection(socket) for socket in facts.tree.sockets):
        return None
    expected = "nftables or iptables, to hold packets back while TCP connections are saved"
    if facts.host.criu.network_lock != "skip":
        return passed(expected, facts.host.criu.network_lock)
    hint = "install iptables, or load the kernel's nf_tables; without it the other end may see a reset"
    return failed(expected, "neither works here", hint)


def _network_lock_here(facts: RestoreFacts) -> Judgement | None:
    used = facts.manifest.criu.network_lock
    if used == "skip" or not any(is_connection(socket) for socket in facts.tree.sockets):
        return None
    here = facts.host.criu.network_lock
    if here == used and here != "nftables" and facts.tcp == "keep" and outside_connections(facts.tree):
        hint = "load the kernel's nf_tables, or see that the other ends are quiet"
        return failed("nftables, to hold packets of kept connections back until the tree is there", here, hint)
    if here == used:
        return passed(f"{used}, as the image has it", here)
    hint = f"make {used} work on this host: CRIU holds packets back by the method of the dump"
    return failed(f"{used}, as the image has it", here, hint)


def _criu_image_version(facts: RestoreFacts) -> Judgement:
    here, made = facts.host.criu.version, facts.manifest.criu.version
    expected = f"CRIU {made} or newer, the one the image was made with"
    if not version(here) or not version(made):
        return unknown(expected, f"CRIU {here or '(none)'}", GET_CRIU)
    if version(here) >= version(made):
        return passed(expected, f"CRIU {here}")
    return failed(expected, f"CRIU {here}", f"install CRIU {made} or newer here, or name one in GPUCKPT_CRIU")


def _machine(facts: RestoreFacts) -> Judgement:
    here, there = facts.host.machine, facts.manifest.host.machine
    if here == there:
        return passed(there, here)
    return failed(there, here, f"restore it on a {there} host")


def _cpu_flags(facts: RestoreFacts) -> Judgement | None:
    here, there = facts.host.cpu, facts.manifest.host.cpu
    if facts.host.machine != facts.manifest.host.machine:
        return None
    expected = f"every instruction set of {there.model}"
    if not here.flags or not there.flags:
        return unknown(expected, "the CPU flags are not known", "compare /proc/cpuinfo of both hosts")
    missing = sorted(relevant_flags(there, facts.host.machine) - set(here.flags))
    hint = f"restore it on a host that has them; {here.model} would end a program that uses one with SIGILL"
    return none_of((f"missing: {flag}" for flag in missing), expected=expected, hint=hint, fine=here.model)


def relevant_flags(cpu: Cpu, machine: str) -> frozenset[str]:
    """The flags that a program can have chosen its code by."""
    if machine not in ("x86_64", "i686"):
        return frozenset(cpu.flags)
    return frozenset(flag for flag in cpu.flags if flag in _X86_FLAGS or flag.startswith(_X86_PREFIXES))


def _kernel(facts: RestoreFacts) -> Judgement:
    here, there = facts.host.kernel, facts.manifest.host.kernel
    expected = f"kernel {there} or newer"
    if version(here)[:2] >= version(there)[:2]:
        return passed(expected, f"kernel {here}")
    hint = "an older kernel may lack what the program uses; if the restore fails, use a host with the same kernel"
    return failed(expected, f"kernel {here}", hint)


def _glibc(facts: RestoreFacts) -> Judgement | None:
    here, there = facts.host.glibc, facts.manifest.host.glibc
    if here is None or there is None:
        return None
    if here == there:
        return passed(f"glibc {there}", f"glibc {here}")
    return failed(
        f"glibc {there}", f"glibc {here}", "the libraries that the job maps must be the same: see files-build"
    )


def _lsm(facts: RestoreFacts) -> Judgement | None:
    here, there = facts.lsm, facts.manifest.criu.lsm
    if here is None:
        return None
    if here == there:
        return passed(there or "no security module", here or "no security module")
    hint = "load the same security module (AppArmor, SELinux) and profiles on both hosts"
    return failed(there or "no security module", here or "no security module", hint)


PRIVILEGE: Check[HasHost] = Check(
    "privilege", "block", "gpuckpt is root and has the capabilities CRIU needs", _privilege, status=10, allowable=False
)
DUMP_PRIVILEGE: Check[DumpFacts] = Check(
    PRIVILEGE.id, PRIVILEGE.severity, PRIVILEGE.summary, _dump_privilege, status=PRIVILEGE.status, allowable=False
)
CRIU_PRESENT: Check[HasHost] = Check(
    "criu-present", "block", "CRIU is on this host and starts", _criu_present, status=10, allowable=False
)
CRIU_WORKS: Check[HasHost] = Check("criu-works", "block", "`criu check` succeeds here", _criu_works, status=10)
CRIU_KERNEL: Check[HasHost] = Check(
    "criu-kernel", "block", "CRIU is new enough for this kernel", _criu_kernel, status=10
)
CRIU_INET: Check[DumpFacts] = Check(
    "criu-inet", "block", "CRIU is new enough for network sockets on this kernel", _criu_inet, status=10
)
NETWORK_LOCK: Check[DumpFacts] = Check(
    "network-lock", "warn", "packets can be held back while TCP connections are saved", _network_lock
)
NETWORK_LOCK_HERE: Check[RestoreFacts] = Check(
    "network-lock", "warn", "packets can be held back as at the dump", _network_lock_here
)
CRIU_IMAGE_VERSION: Check[RestoreFacts] = Check(
    "criu-image", "block", "CRIU is not older than the one that made the image", _criu_image_version, status=10
)
MACHINE: Check[RestoreFacts] = Check(
    "machine", "block", "the machine is of the image's architecture", _machine, allowable=False
)
CPU_FLAGS: Check[RestoreFacts] = Check(
    "cpu-flags", "block", "the CPU has every instruction set the image's had", _cpu_flags
)
KERNEL: Check[RestoreFacts] = Check("kernel", "warn", "the kernel is not older than the image's", _kernel)
GLIBC: Check[RestoreFacts] = Check("glibc", "note", "the C library is the image's version", _glibc)
LSM: Check[RestoreFacts] = Check("lsm", "warn", "the security modules are those of the dump", _lsm)

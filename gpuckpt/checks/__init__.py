"""Checks: pure functions of facts. The lists are explicit; a new check is one function and one entry here.

`judge` gives one finding for every check that applies, also for those that pass: `--dry-run` shows them all.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

from gpuckpt.checks import (
    arrival,
    filechoice,
    files,
    gpu,
    gpu_restore,
    gpu_several,
    image,
    isolation,
    machine,
    objects,
    processes,
)
from gpuckpt.checks.check import Check, Judgement
from gpuckpt.checks.facts import (
    DumpFacts,
    HostFacts,
    MemoryLimit,
    RestoreFacts,
    has_own_place,
    needed_addresses,
    needed_ids,
    needed_paths,
    needed_ports,
    needed_unix_names,
)
from gpuckpt.checks.filechoice import Choice, appends_only, chosen_files, needs_at_restore, writable_files
from gpuckpt.checks.fileplan import FileAct, file_acts
from gpuckpt.checks.gpu_restore import resolve_map
from gpuckpt.checks.objects import needs_terminal, restore_needs
from gpuckpt.model.errors import Busy, GpuckptError, MachineLacks, NotFound, Refused, UsageError
from gpuckpt.model.report import Finding

__all__ = [
    "AT_REST_CHECKS",
    "DUMP_CHECKS",
    "HOOK_MAY_LIFT",
    "HOST_CHECKS",
    "RESTORE_CHECKS",
    "Check",
    "Choice",
    "DumpFacts",
    "FileAct",
    "HostFacts",
    "Judgement",
    "MemoryLimit",
    "RestoreFacts",
    "allow_error",
    "appends_only",
    "blocking",
    "chosen_files",
    "file_acts",
    "has_own_place",
    "judge",
    "needed_addresses",
    "needed_ids",
    "needed_paths",
    "needed_ports",
    "needed_unix_names",
    "needs_at_restore",
    "needs_terminal",
    "refusal",
    "resolve_map",
    "restore_needs",
    "unknown_ids",
    "writable_files",
]

DUMP_CHECKS: tuple[Check[DumpFacts], ...] = (
    machine.DUMP_PRIVILEGE,
    machine.CRIU_PRESENT,
    machine.CRIU_WORKS,
    machine.CRIU_KERNEL,
    machine.CRIU_INET,
    machine.NETWORK_LOCK,
    processes.ALIVE,
    processes.KERNEL_THREAD,
    processes.OWN_ANCESTOR,
    processes.FOREIGN,
    processes.TRACED,
    processes.UNINTERRUPTIBLE,
    processes.STOPPED,
    processes.CONTAINER,
    processes.NAMESPACES,
    processes.FOREGROUND,
    processes.SUPERVISOR,
    objects.IO_URING,
    objects.DEVICES,
    objects.KERNEL_OBJECTS,
    objects.TCP_OUTSIDE,
    objects.UNIX_OUTSIDE,
    objects.PIPE_OUTSIDE,
    objects.STDIO,
    objects.WATCHES,
    objects.LOCKS,
    objects.DELETED,
    image.IMAGE_ABSENT,
    image.IMAGE_PARENT,
    image.IMAGE_PARENT_SAFE,
    image.DISK_SPACE,
    filechoice.CAPTURE_FILES,
    filechoice.LEFT_FILES,
    gpu.GPU_DRIVER,
    gpu.GPU_FEATURES,
    gpu.GPU_BUGS,
    gpu.GPU_READABLE,
    gpu.GPU_MIG,
    gpu.GPU_MPS,
    gpu.GPU_FILES,
    gpu.GPU_STATE,
    gpu.GPU_COPY_ROOM,
    gpu.GPU_SHARED,
    gpu.GPU_MANAGED,
    gpu_several.GPU_SEVERAL,
    gpu.GPU_PERSISTENCE,
    gpu.HUGE_PAGES,
    gpu.NCCL,
)

AT_REST_CHECKS = tuple(check for check in DUMP_CHECKS if check is not image.DISK_SPACE)
"""What a tree is judged by once more when it stands still. Not the room for its image, which is written by then; and
the driver's copy, now part of the tree's memory, would count beside the GPU's."""

RESTORE_CHECKS: tuple[Check[RestoreFacts], ...] = (
    machine.PRIVILEGE,
    machine.CRIU_PRESENT,
    machine.CRIU_WORKS,
    machine.CRIU_KERNEL,
    machine.CRIU_IMAGE_VERSION,
    machine.NETWORK_LOCK_HERE,
    machine.MACHINE,
    machine.CPU_FLAGS,
    machine.KERNEL,
    machine.GLIBC,
    machine.LSM,
    image.IMAGE_SAFE,
    image.ORIGINAL,
    image.LINKED_FILES,
    image.LEFTOVERS,
    files.FILES_MISSING,
    files.DIRECTORIES,
    files.FILES_SIZE,
    files.FILES_CHANGED,
    files.FILES_WRITTEN,
    files.FILES_BUILD,
    files.FILES_MODE,
    files.FILES_OWNER,
    files.FILES_CONTENT,
    files.FILES_CAPTURED,
    arrival.PIDS_FREE,
    arrival.PORTS_FREE,
    arrival.ADDRESSES,
    arrival.TCP_DECIDED,
    arrival.STDIO_GIVEN,
    arrival.STDIO_USED,
    arrival.TERMINAL,
    arrival.HOST_MEMORY,
    arrival.LOCKS_FREE,
    isolation.NETWORK,
    isolation.TERMINAL_INSIDE,
    isolation.PORTS_MOVED,
    isolation.UNIX_NAMES,
    isolation.CLONE_TCP,
    isolation.CLONE_MEMORY,
    isolation.CLONE_FILES,
    isolation.CLONE_IDENTITY,
    gpu.GPU_DRIVER,
    gpu.GPU_BUGS,
    gpu.GPU_MPS,
    gpu.GPU_PERSISTENCE,
    gpu.HUGE_PAGES,
    gpu_restore.SAME_DRIVER,
    gpu_restore.GPU_LIBRARIES,
    gpu_restore.GPU_PRESENT,
    gpu_restore.GPU_MAP,
    gpu_restore.GPU_MODEL,
    gpu_restore.GPU_COUNT,
    gpu_restore.GPU_MIG_HERE,
    gpu_restore.GPU_MEMORY,
    gpu_restore.GPU_BUS_IDS,
)

HOST_CHECKS: tuple[Check[HostFacts], ...] = (
    machine.PRIVILEGE,
    machine.CRIU_PRESENT,
    machine.CRIU_WORKS,
    machine.CRIU_KERNEL,
    image.LEFTOVERS,
    gpu.GPU_DRIVER,
    gpu.GPU_BUGS,
    gpu.HUGE_PAGES,
)
"""What a host alone can be judged by; each of them stands in the other lists too."""

HOOK_MAY_LIFT: frozenset[str] = frozenset(
    check.id
    for check in (
        *(objects.IO_URING, objects.DEVICES, objects.KERNEL_OBJECTS, objects.TCP_OUTSIDE, objects.UNIX_OUTSIDE),
        *(objects.PIPE_OUTSIDE, objects.WATCHES, image.DISK_SPACE, filechoice.CAPTURE_FILES),
        *(gpu.GPU_FILES, gpu.GPU_MPS, gpu.GPU_COPY_ROOM, gpu.NCCL),
        *(files.FILES_MISSING, files.DIRECTORIES, files.FILES_SIZE, files.FILES_CHANGED, files.FILES_BUILD),
        *(files.FILES_MODE, files.FILES_OWNER, files.FILES_CONTENT, files.FILES_CAPTURED, files.FILES_WRITTEN),
        *(arrival.PIDS_FREE, arrival.PORTS_FREE, arrival.ADDRESSES, arrival.HOST_MEMORY, arrival.LOCKS_FREE),
        *(isolation.NETWORK, isolation.UNIX_NAMES, gpu_restore.GPU_MEMORY),
    )
)
"""What --pre-dump or --pre-restore can change: what the tree holds, the room there is, who is in the way. Where such
a command is given these refuse only after it."""

PRECEDENCE: tuple[type[GpuckptError], ...] = (MachineLacks, NotFound, Busy, Refused)
"""Which failure gives the exit status when several checks block."""

F = TypeVar("F", DumpFacts, RestoreFacts, HostFacts)


def judge(checks: Sequence[Check[F]], facts: F, allow: frozenset[str]) -> tuple[Finding, ...]:
    """The findings of all checks that apply, in the order of the list; `allow` opens blocks by name."""
    findings = (check.finding(facts, allow) for check in checks)
    return tuple(finding for finding in findings if finding is not None)


def blocking(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """The findings that stop the operation."""
    return tuple(finding for finding in findings if finding.blocks)


def refusal(findings: Iterable[Finding]) -> GpuckptError | None:
    """The error for findings that block, or None. One finding speaks for itself; several are counted and named."""
    stops = blocking(findings)
    if not stops:
        return None
    kind = next(kind for kind in PRECEDENCE if any(stop.status == kind.status for stop in stops))
    if len(stops) == 1:
        stop = stops[0]
        return kind(f"{stop.id}: {stop.found} (expected: {stop.expected})", _with_override(stop.hint, stops))
    first = next(stop for stop in stops if stop.status == kind.status)
    message = f"{len(stops)} checks refused: {', '.join(stop.id for stop in stops)}; first, {first.id}: {first.found}"
    return kind(message, _with_override(f"{first.hint}; --dry-run shows what to do for each", stops))


def _with_override(hint: str, stops: tuple[Finding, ...]) -> str:
    # What cannot be undone is not offered: whoever wants it finds the id in the finding and reads the manual first.
    if any(stop.irreversible or stop.id not in _allowable_ids() for stop in stops):
        return hint
    return f"{hint} (--allow {','.join(stop.id for stop in stops)} goes on all the same)"


def _all_checks() -> tuple[Check[DumpFacts] | Check[RestoreFacts], ...]:
    return (*DUMP_CHECKS, *RESTORE_CHECKS)


def _allowable_ids() -> frozenset[str]:
    return frozenset(check.id for check in _all_checks() if check.allowable and check.severity == "block")


def unknown_ids(allow: Iterable[str]) -> dict[str, str | None]:
    """Names in --allow that are no check's -> the nearest name, if one is near."""
    import difflib  # noqa: PLC0415  only a wrong name needs it

    known = sorted({check.id for check in _all_checks()})
    wrong = (name for name in sorted(allow) if name not in known)
    return {name: next(iter(difflib.get_close_matches(name, known, n=1)), None) for name in wrong}


def allow_error(allow: Iterable[str]) -> UsageError | None:
    """The usage error for --allow with a name that is no check's, or of a check that nothing can open."""
    names = sorted(allow)
    for name, near in unknown_ids(names).items():
        hint = f"did you mean {near}?" if near else "`--dry-run` shows the checks and their ids"
        return UsageError(f"--allow {name}: there is no such check", hint)
    fixed = {check.id: check for check in _all_checks() if not check.allowable}
    for name in names:
        if name in fixed:
            return UsageError(f"--allow {name}: this check cannot be overridden", f"it says: {fixed[name].summary}")
    return None

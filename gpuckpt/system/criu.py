"""CRIU: where it is, what it can do, and its command lines. Nobody else builds a CRIU argv.

Rules behind the options (CRIU 4.2 to 4.3): only absolute paths, for CRIU resolves others below the
image directory; no configuration files and an empty plugin directory, so that the result does not
depend on what lies on the host; the work directory lies outside the image, for a full disk must not
swallow the log.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from gpuckpt.model.facts import CriuProgram
from gpuckpt.model.records import dataclass
from gpuckpt.system import commands
from gpuckpt.system.asking import meanwhile

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gpuckpt.model.manifest import CriuOptions

CHECK_TIMEOUT = 30.0
TIMEOUT_SECONDS = 60
"""CRIU's own limit for collecting (seizing) the tasks."""

CPU_CAP = "ins,fpu"

_VERSION = re.compile(r"Version: (\d+(?:\.\d+)*)")


def find() -> Path | None:
    """The CRIU to use: $GPUCKPT_CRIU, else the first in PATH and the system directories."""
    return commands.find_program("criu", os.environ.get("GPUCKPT_CRIU"))


def examine() -> CriuProgram:
    """What the host's CRIU is and can do. Never raises: a problem is a fact in words."""
    path = find()
    if path is None:
        return CriuProgram(problem=_not_found())
    try:
        return _examine(path)
    except OSError as error:
        return CriuProgram(path=str(path), problem=f"cannot be started: {error.strerror}")


def _examine(path: Path) -> CriuProgram:
    """Raises OSError where it cannot be started, or not any more."""
    answer = commands.run([str(path), "--version"], timeout=CHECK_TIMEOUT)
    version = _VERSION.search(answer.stdout)
    if version is None:
        said = (answer.stderr or answer.stdout).strip().splitlines()
        why = said[0] if said else _in_words(answer)
        return CriuProgram(path=str(path), problem=f"does not tell its version: {why}")
    return _examine_working(path, version.group(1))


def _in_words(answer: commands.Completed) -> str:
    return "no output" if answer.ok else answer.describe()


def _not_found() -> str:
    override = os.environ.get("GPUCKPT_CRIU")
    return f"GPUCKPT_CRIU={override} is not a program" if override else "not found"


def _examine_working(path: Path, version: str) -> CriuProgram:
    with meanwhile(lambda: _has(path, "network_lock_nftables")) as has_nftables:
        checked = commands.run([str(path), "check", "--no-default-config"], timeout=CHECK_TIMEOUT)
        network_lock = "nftables" if has_nftables() else _iptables_or_skip()
    output = (checked.stdout + checked.stderr).strip()
    return CriuProgram(
        path=str(path),
        version=version,
        check_ok=checked.ok,
        check_output=output[-2000:],
        network_lock=network_lock,
        problem="" if checked.ok else f"`criu check` {checked.describe()}",
    )


def _has(path: Path, feature: str) -> bool:
    argv = [str(path), "check", "--no-default-config", "--feature", feature]
    return commands.run(argv, timeout=CHECK_TIMEOUT).ok


def _iptables_or_skip() -> Literal["iptables", "skip"]:
    return "iptables" if commands.find_program("iptables-restore") else "skip"


@dataclass(frozen=True, slots=True)
class WorkPaths:
    """Where CRIU works: all absolute."""

    images: Path
    work: Path
    plugins: Path
    """An empty directory: no plugin may act on the tree behind the owner's back."""
    gate: Path
    """The action script."""

    @property
    def log(self) -> Path:
        """CRIU's log (it also names the run, for its network lock)."""
        return self.work / "criu.log"


def _common(program: str, verb: str, paths: WorkPaths, options: CriuOptions) -> list[str]:
    argv = [
        program,
        verb,
        "--no-default-config",
        "--images-dir",
        str(paths.images),
        "--work-dir",
        str(paths.work),
        "--log-file",
        str(paths.log),
        "-v4",
        "--libdir",
        str(paths.plugins),
        "--action-script",
        str(paths.gate),
        "--manage-cgroups=ignore",
        f"--cpu-cap={options.cpu_cap}",
    ]
    return argv + _repeated(options)


def _repeated(options: CriuOptions) -> list[str]:
    """What a restore must be told as the dump was."""
    argv = ["--link-remap"]
    argv += ["--shell-job"] if options.shell_job else []
    argv += ["--file-locks"] if options.file_locks else []
    argv += ["--tcp-established"] if options.tcp_established else []
    argv += ["--ext-unix-sk"] if options.ext_unix_sockets else []
    return argv


def dump_argv(
    program: str, pid: int, paths: WorkPaths, options: CriuOptions, *, leave_running: bool, stream: bool = False
) -> list[str]:
    """`criu dump`: ends the tree when the gate commits, unless it shall be left running.

    With `stream` it connects to a socket in the images directory and hands every file over (images/streaming.py).
    """
    argv = _common(program, "dump", paths, options)
    argv += ["--tree", str(pid), "--timeout", str(TIMEOUT_SECONDS)]
    argv += ["--ghost-limit", str(options.ghost_limit_bytes), "--network-lock", options.network_lock]
    argv += ["--leave-running"] if leave_running else []
    argv += ["--stream"] if stream else []
    for external in options.external:
        argv += ["--external", external]
    return argv


def restore_argv(
    program: str,
    paths: WorkPaths,
    options: CriuOptions,
    *,
    inherited: Sequence[tuple[int, str]],
    pidfile: Path,
    leave_stopped: bool = False,
) -> list[str]:
    """`criu restore`, detached, as a child of the caller so that the caller can wait for it.

    `inherited` pairs a descriptor number of the CRIU process with the key of the end it stands for. With
    `leave_stopped` every process comes up in state T, by a SIGSTOP queued before its first instruction;
    network locks are lifted all the same.
    """
    argv = _common(program, "restore", paths, options)
    argv += ["--restore-detached", "--restore-sibling", "--pidfile", str(pidfile)]
    argv += ["--leave-stopped"] if leave_stopped else []
    for number, key in inherited:
        argv += ["--inherit-fd", f"fd[{number}]:{key}"]
    return argv


def by_hand_argv(
    program: str, images: Path, options: CriuOptions, *, inherited: Sequence[tuple[int, str]]
) -> list[str]:
    """The `criu restore` for a person who has a plain image directory and no gpuckpt."""
    argv = [program, "restore", "--no-default-config", "--images-dir", str(images), "--restore-detached"]
    argv += ["--manage-cgroups=ignore", f"--cpu-cap={options.cpu_cap}"]
    argv += _repeated(options)
    for number, key in inherited:
        argv += ["--inherit-fd", f"fd[{number}]:{key}"]
    return argv

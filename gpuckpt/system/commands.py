"""The one place that starts programs.

Programs are resolved once to an absolute path, started without a shell, with a small environment of
their own and nothing on standard input, and never waited for without a limit. cron's PATH is short,
so the usual system directories are searched as well.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess  # noqa: TID251 - this is its home
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpuckpt.model.records import dataclass

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from gpuckpt.system.invoker import Invoker

EXTRA_DIRECTORIES = ("/usr/local/sbin", "/usr/sbin", "/sbin", "/usr/local/bin", "/usr/bin", "/opt/gpuckpt/criu/bin")

SHELL = "/bin/sh"

PIPE = subprocess.PIPE
"""For the `stdin` of `start`: see `Child.collect`."""

PASSED_ON = (
    "PATH",
    "HOME",
    "TMPDIR",
    "LD_LIBRARY_PATH",
    "PYTHONPATH",
    "GPUCKPT_CRIU",
    "GPUCKPT_TMPDIR",
    "CUDA_VISIBLE_DEVICES",
)
"""Variables a started program inherits: enough to find programs and the driver's libraries."""


@dataclass(frozen=True, slots=True)
class Completed:
    """A finished program."""

    argv: tuple[str, ...]
    status: int
    """Exit status; -n when signal n ended it, as subprocess has it."""
    stdout: str
    stderr: str
    timed_out: bool = False

    @property
    def ok(self) -> bool:
        """Ended by itself with status 0."""
        return self.status == 0 and not self.timed_out

    def describe(self) -> str:
        """How it ended, in words."""
        if self.timed_out:
            return f"{self.argv[0]} did not end in time"
        return f"{self.argv[0]} {describe_status(self.status)}"


def describe_status(status: int) -> str:
    """'exited with 1' or 'was ended by SIGKILL' for a subprocess return code."""
    if status >= 0:
        return f"exited with {status}"
    try:
        return f"was ended by {signal.Signals(-status).name}"
    except ValueError:
        return f"was ended by signal {-status}"


def find_program(name: str, override: str | None = None) -> Path | None:
    """The absolute path of a program: the override where given, else PATH, else the system directories."""
    if override:
        path = Path(override)
        return path.absolute() if _executable(path) else None
    for directory in (*os.environ.get("PATH", "").split(os.pathsep), *EXTRA_DIRECTORIES):
        path = Path(directory) / name
        if directory.startswith("/") and _executable(path):
            return path
    return None


def _executable(path: Path) -> bool:
    # os.path: a PATH may name directories that this user may not read.
    return os.path.isfile(path) and os.access(path, os.X_OK)  # noqa: PTH113


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of a started program: what it needs, messages in English, nothing else."""
    kept = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
    kept.setdefault("PATH", ":".join(EXTRA_DIRECTORIES[:-1]))
    return {**kept, "LC_ALL": "C.UTF-8", **(extra or {})}


def run(
    argv: Sequence[str],
    *,
    timeout: float,
    extra_environment: Mapping[str, str] | None = None,
    cwd: str | None = None,
    identity: Invoker | None = None,
    stdin: int | None = None,
    pass_fds: Sequence[int] = (),
    new_session: bool = False,
) -> Completed:
    """Run a program to its end and return what it printed; as another user where `identity` is given.

    After `timeout` seconds it is killed with its whole process group. Raises OSError when it cannot
    be started.
    """
    child = start(
        argv,
        extra_environment=extra_environment,
        cwd=cwd,
        capture=True,
        identity=identity,
        stdin=stdin,
        pass_fds=pass_fds,
        new_session=new_session,
    )
    return child.collect(timeout)


def _text(raw: bytes | None) -> str:
    return (raw or b"").decode("utf-8", "surrogateescape")


class Child:
    """A started program in a process group of its own."""

    def __init__(self, argv: tuple[str, ...], process: subprocess.Popen[bytes]) -> None:
        self.argv = argv
        self.process = process

    @property
    def pid(self) -> int:
        """Its process id, which is its process group too."""
        return self.process.pid

    def poll(self) -> int | None:
        """Its status, or None while it runs; -n for signal n."""
        return self.process.poll()

    def wait(self, timeout: float) -> int | None:
        """Wait at most `timeout` seconds for its end."""
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            return None

    def collect(self, timeout: float, told: str = "") -> Completed:
        """All that a program whose output is captured prints, to its end; after `timeout` seconds as in `run`.

        `told`: what it gets on its standard input, where that is a PIPE.
        """
        try:
            stdout, stderr = self.process.communicate(told.encode() or None, timeout=timeout)
            timed_out = False
        except subprocess.TimeoutExpired:
            self.kill_group()
            stdout, stderr = self.process.communicate()
            timed_out = True
        return Completed(self.argv, self.process.returncode, _text(stdout), _text(stderr), timed_out)

    @property
    def has_ended(self) -> bool:
        """It has ended. It stays a zombie until `wait`: so long its process group's number is nobody else's."""
        if self.process.returncode is not None:
            return True
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def signal_group(self, number: int) -> None:
        """Signal its whole process group; only before `wait`."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, number)

    def kill(self) -> None:
        """SIGKILL it alone."""
        self.process.kill()

    def kill_group(self) -> None:
        """SIGKILL its whole process group: CRIU may have every other signal blocked."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)


def start(
    argv: Sequence[str],
    *,
    extra_environment: Mapping[str, str] | None = None,
    cwd: str | None = None,
    capture: bool = False,
    stdin: int | None = None,
    output: int | None = None,
    errors: int | None = None,
    pass_fds: Sequence[int] = (),
    before_exec: Callable[[], None] | None = None,
    new_session: bool = False,
    own_group: bool = True,
    identity: Invoker | None = None,
) -> Child:
    """Start a program; stdin is empty unless given, output goes to `output`, a pipe (`capture`) or nowhere.

    Its stderr goes the same way unless `errors` is given. With an `identity` it runs as that user.

    `before_exec` runs in the child between fork and exec; only single-threaded callers may use it.
    Raises OSError when the program cannot be started.
    """
    sink = subprocess.PIPE if capture else subprocess.DEVNULL if output is None else output
    process = subprocess.Popen(
        list(argv),
        stdin=subprocess.DEVNULL if stdin is None else stdin,
        stdout=sink,
        stderr=sink if errors is None else errors,
        env=environment({**(extra_environment or {}), **(identity.environment if identity else {})}),
        cwd=cwd,
        pass_fds=tuple(pass_fds),
        start_new_session=new_session,
        **(_own_group(new_session, before_exec) if own_group else {"preexec_fn": before_exec}),
        user=None if identity is None else identity.uid,
        group=None if identity is None else identity.gid,
        extra_groups=None if identity is None else identity.groups,
    )
    return Child(tuple(argv), process)


def fork() -> int:
    """This very process a second time, which has one thread: 0 in the new one, in the old one its pid."""
    return os.fork()  # noqa: TID251 - this is its home


def start_line(line: str, extra_environment: Mapping[str, str]) -> Child:
    """Start a user's own command line (a hook) with `/bin/sh -c`, in a session of its own; its output is a pipe.

    It has the environment of gpuckpt's caller, the working directory too, and nothing on standard input. Raises
    OSError when the shell cannot be started.
    """
    process = subprocess.Popen(
        [SHELL, "-c", line],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, **extra_environment},
        # No terminal of ours: Ctrl-C is for gpuckpt, which ends the command in its own order.
        start_new_session=True,
    )
    return Child((SHELL, "-c", line), process)


def _own_group(new_session: bool, before_exec: Callable[[], None] | None) -> dict[str, Any]:  # noqa: FBT001
    """Popen's arguments for a process group of its own; Python 3.10 has none but preexec_fn."""
    if new_session or sys.version_info >= (3, 11):
        return {"preexec_fn": before_exec} if new_session else {"preexec_fn": before_exec, "process_group": 0}

    def prepare() -> None:
        os.setpgid(0, 0)
        if before_exec is not None:
            before_exec()

    return {"preexec_fn": prepare}


def python_module(module: str, *arguments: str) -> list[str]:
    """The command line that runs a module of this very installation (start it in `/`: 3.10 searches the cwd)."""
    options = ["-s", "-P"] if sys.version_info >= (3, 11) else ["-s"]
    return [sys.executable, *options, "-m", module, *arguments]


def python_file(path: Path, *arguments: str) -> list[str]:
    """The command line that runs a file of ours alone: no package around it, no site directory."""
    return [sys.executable, "-I", "-S", str(path), *arguments]

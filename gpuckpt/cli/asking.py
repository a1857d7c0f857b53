"""What dump and migrate ask in the same words of the tree that they save: one set of options, as one value."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from gpuckpt.cli import options
from gpuckpt.cli.grouping import grouped
from gpuckpt.model.errors import UsageError
from gpuckpt.model.records import dataclass

if TYPE_CHECKING:
    from collections.abc import Callable

Tcp = Annotated[
    Literal["refuse", "keep", "close"],
    typer.Option("--tcp", metavar="refuse|keep|close", help="What to do about connections that leave the tree."),
]
PreDump = Annotated[
    str | None, options.hook("pre-dump", "Run this first, with /bin/sh -c; if it fails, nothing is touched.")
]
PostDump = Annotated[str | None, options.hook("post-dump", "Run this last, whatever came of it; it is told what.")]

OPTIONS: dict[str, tuple[Any, Any]] = {
    "tree": (options.Tree, None),
    "pid_file": (options.PidFile, None),
    "unit": (options.Unit, None),
    "tcp": (Tcp, "refuse"),
    "huge_pages": (options.HugePages, False),
    "dry_run": (options.DryRun, False),
    "allow": (options.Allow, None),
    "keep_argv": (options.KeepArgv, False),
    "timeout": (options.Timeout, None),
    "lock_timeout": (options.LockTimeout, 60.0),
    "settle": (options.Settle, 3.0),
    "level": (options.Level, "-1"),
    "workers": (options.Workers, None),
    "pre_dump": (PreDump, None),
    "post_dump": (PostDump, None),
    "hook_timeout": (options.HookTimeout, 60.0),
    "metrics_file": (options.MetricsFile, None),
    "force_program": (options.ForceProgram, False),
}


@dataclass(frozen=True, slots=True)
class Asked:
    """What the person said of the tree."""

    tree: int | None
    pid_file: str | None
    unit: str | None
    tcp: Literal["refuse", "keep", "close"]
    huge_pages: bool
    dry_run: bool
    allow: list[str] | None
    keep_argv: bool
    timeout: float | None
    lock_timeout: float
    settle: float
    level: str
    workers: int | None
    pre_dump: str | None
    post_dump: str | None
    hook_timeout: float
    metrics_file: str | None
    force_program: bool

    def as_request(self) -> dict[str, Any]:
        """The fields of a TreeRequest. Raises UsageError."""
        require_one("which process is meant", {"--tree": self.tree, "--pid-file": self.pid_file, "--unit": self.unit})
        return {
            "pid": self.tree or 0,
            "pid_file": None if self.pid_file is None else options.absolute(self.pid_file),
            "unit": self.unit,
            "tcp": self.tcp,
            "huge_pages": self.huge_pages,
            "dry_run": self.dry_run,
            "allow": options.check_ids(self.allow),
            "keep_argv": self.keep_argv,
            "timeout_seconds": self.timeout,
            "lock_timeout_seconds": self.lock_timeout,
            "settle_seconds": self.settle,
            "level": None if self.level == "none" else int(self.level),
            "workers": self.workers,
            "hooks": options.hooks(self.pre_dump, self.post_dump, self.hook_timeout),
            "metrics_file": None if self.metrics_file is None else options.absolute(self.metrics_file),
            "force_program": self.force_program,
        }


def with_tree(command: Callable[..., int]) -> Callable[..., int]:
    """Give a command these options in the place of its parameter `asked`."""
    return grouped("asked", OPTIONS, Asked)(command)


def require_one(what: str, given: dict[str, object]) -> None:
    """Exactly one of these options. Raises UsageError."""
    named = [option for option, value in given.items() if value is not None]
    if len(named) != 1:
        why = f"{' and '.join(named)} are both given" if named else f"nothing says {what}"
        raise UsageError(why, f"name one of {', '.join(given)}")

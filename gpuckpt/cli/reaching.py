"""How another host is reached: one set of options for all commands that can, which get them as one value."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from gpuckpt.cli import options
from gpuckpt.model.errors import UsageError
from gpuckpt.model.location import Location
from gpuckpt.model.records import dataclass

if TYPE_CHECKING:
    from gpuckpt.model.requests import Reach

TO_ASK = {"remote_command": options.RemoteCommand, "ssh_config": options.SshConfig}
TO_CARRY = {"connections": options.Connections, "bwlimit": options.BandwidthLimit, **TO_ASK}


@dataclass(frozen=True, slots=True)
class Ways:
    """What the person said of how other hosts are reached."""

    remote_command: str | None = None
    ssh_config: str | None = None
    connections: int | None = None
    bwlimit: float | None = None

    def reach(self, where: Location) -> Reach:
        """How this host is reached. Raises UsageError."""
        return options.reach(
            where,
            self.ssh_config,
            self.remote_command,
            connections=self.connections,
            bytes_per_second=self.bwlimit,
        )

    def refuse_here(self) -> None:
        """What is named lies on this host. Raises UsageError where an option says otherwise."""
        for name in TO_CARRY:
            if getattr(self, name) is not None:
                raise UsageError(f"--{name.replace('_', '-')} is for another host", "name it: user@host:/path")


def with_ways(shared: dict[str, Any]) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Give a command the shared options in the place of its parameter `ways`, which takes them together."""

    def decorate(command: Callable[..., int]) -> Callable[..., int]:
        def called(**given: Any) -> int:
            ways = Ways(**{name: given.pop(name) for name in shared})
            return command(**given, ways=ways)

        told: list[inspect.Parameter] = []
        # Not typing.get_type_hints: Python 3.10 hides an Annotated whose default is None in an Optional.
        for name, parameter in inspect.signature(command, eval_str=True).parameters.items():
            told += [_option(option, hint) for option, hint in shared.items()] if name == "ways" else [parameter]
        called.__name__, called.__doc__, called.__module__ = command.__name__, command.__doc__, command.__module__
        # Where Typer looks for what a command takes.
        called.__signature__ = inspect.Signature(told)  # type: ignore[attr-defined]
        called.__annotations__ = {one.name: one.annotation for one in told}
        return called

    return decorate


def _option(name: str, hint: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=hint)

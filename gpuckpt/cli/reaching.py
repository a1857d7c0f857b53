"""How another host is reached: one set of options for all commands that can, which get them as one value."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from gpuckpt.cli import options
from gpuckpt.cli.grouping import grouped
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
    """Give a command the shared options in the place of its parameter `ways`."""
    return grouped("ways", {name: (hint, None) for name, hint in shared.items()}, Ways)

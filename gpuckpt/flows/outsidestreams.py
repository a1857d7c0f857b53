"""Where the ends outside of a restored tree go: the files given, with --wait our own streams, and a terminal.

What the owner opens for them: owner/streams.py.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from gpuckpt import checks
from gpuckpt.owner.messages import INHERITED_FD, Inherited
from gpuckpt.system.terminal import PtyRelay

if TYPE_CHECKING:
    from gpuckpt.model.facts import Stdio
    from gpuckpt.model.manifest import Manifest
    from gpuckpt.model.requests import RestoreRequest


class OutsideStreams:
    """Those of one restore. What `open` opens is open until `close`."""

    def __init__(self) -> None:
        self.relay: PtyRelay | None = None
        """With --wait, of a job that has a terminal."""
        self._copies: dict[int, int] = {}
        """With --wait: our own standard streams -> the descriptors under which the owner has them."""

    def open(self, request: RestoreRequest, manifest: Manifest) -> None:
        """Open what the owner must be given. Raises OSError; what was opened by then is there to be closed."""
        if request.wait and checks.needs_terminal(manifest.tree):
            self.relay = PtyRelay()
        if request.wait:
            # Copies: the owner's own descriptors 0-2 are others, and CRIU's too.
            self._copies = {number: os.dup(number) for number in (0, 1, 2)}

    @property
    def pass_fds(self) -> tuple[int, ...]:
        """The descriptors that the owner is to have, under the same numbers."""
        return (*self._copies.values(), *((self.relay.master,) if self.relay is not None else ()))

    def inherited(self, request: RestoreRequest, manifest: Manifest) -> tuple[Inherited, ...]:
        """What CRIU shall put where the tree's ends led outside."""
        ends = (self._inherit(stdio, request, manifest) for stdio in manifest.tree.outside_stdio)
        return tuple(found for found in ends if found is not None)

    def _inherit(self, stdio: Stdio, request: RestoreRequest, manifest: Manifest) -> Inherited | None:
        """Where an outside end goes: the given file, with --wait our own stream, for a terminal CRIU's stdin."""
        if stdio.kind == "tty":
            # A job that joins the owner's session gets the pty as CRIU's stdin.
            if self.relay is None or stdio.key not in manifest.criu.external:
                return None
            return Inherited(stdio.key, self.relay.slave_path, readable=True, writable=True)
        path = request.stdio.get(stdio.fd)
        if path is not None:
            return Inherited(stdio.key, str(path), **_access(stdio))
        if not self._copies:
            return None
        return Inherited(stdio.key, f"{INHERITED_FD}{self._copies[stdio.fd]}", **_access(stdio))

    def close(self) -> None:
        """Close our side: the owner has its own by now."""
        for copy in self._copies.values():
            os.close(copy)
        if self.relay is not None:
            self.relay.close()


def _access(stdio: Stdio) -> dict[str, bool]:
    """What the tree does with this end. A socket is open for both: there its descriptors' numbers tell."""
    if stdio.kind != "socket":
        return {"readable": not stdio.writable, "writable": stdio.writable}
    numbers = {int(holder.rpartition(" ")[2]) for holder in stdio.holders}
    return {"readable": 0 in numbers, "writable": numbers != {0}}

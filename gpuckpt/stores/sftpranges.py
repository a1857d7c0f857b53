"""Digests of ranges of files on a host that has a shell and no gpuckpt, over one connection (farsums.RANGES)."""

from __future__ import annotations

import hashlib
import re
import time
from typing import TYPE_CHECKING

from gpuckpt.stores import farsums
from gpuckpt.stores.sftpcheck import LOOK_SECONDS, SLOWEST_DISK
from gpuckpt.system.links import LinkLost, Silent

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from blake3 import blake3 as Blake3  # noqa: N812 - the class, which has a function's name

    from gpuckpt.model.manifest import Part
    from gpuckpt.stores.protocol import Offer, Piece
    from gpuckpt.system.ssh import Caller

PLAIN = re.compile(rb"/[A-Za-z0-9._/+,:@%=-]+")
"""Paths that `read` in any shell gives as they are."""

MOST_LINE = 512


class FarRanges:
    """A loop in a shell there; for one thread, but for `cut`."""

    def __init__(self, caller: Caller, root: bytes, parts: Sequence[Part], going_on: Callable[[], None]) -> None:
        """Ask which program there is: `program`, '' where there is none. Raises LinkLost, TimeoutError.

        `going_on` is called now and then while an answer is waited for, and may raise.
        """
        self._root, self._parts, self._going_on = root, parts, going_on
        self._stall_seconds = caller.stall_seconds
        self._said = b""
        self._call = caller.run(farsums.RANGES, further=True, poll_seconds=LOOK_SECONDS)
        try:
            self.program = farsums.program_of(self._line(0))
        except LinkLost:
            # It is not said why; whoever asks for whole parts then learns it.
            self.program = ""
        except BaseException:
            self._call.close()
            raise

    def fit(self, pieces: Sequence[Piece], source: Offer, whole: Blake3) -> bool:
        """Whether a range there, these pieces of one part, has the digest that it has in `source`.

        `whole` is given the bytes: whether they are what the manifest says, their part shows.
        """
        path = self._root + b"/" + self._parts[pieces[0].part].path.encode("utf-8", "surrogateescape")
        if not PLAIN.fullmatch(path):
            return False
        self._call.link.send(b"%d %d %s\n" % (pieces[0].number, len(pieces), path))
        hasher, reader = hashlib.sha256(), source.open_reader()
        try:
            for _, content in reader.stream(iter(pieces)):
                hasher.update(content)
                whole.update(content)
        finally:
            reader.close()
        [there] = farsums.digests(self._line(sum(piece.size for piece in pieces)), 1) or [""]
        return there == hasher.hexdigest()

    def _line(self, size: int) -> bytes:
        """The next line it says, about `size` bytes. Raises LinkLost, TimeoutError."""
        deadline = time.monotonic() + self._stall_seconds + size / SLOWEST_DISK
        while b"\n" not in self._said:
            if time.monotonic() > deadline:
                raise TimeoutError
            if len(self._said) > MOST_LINE:
                raise LinkLost("it says something else than a digest")
            try:
                self._said += self._call.link.receive(MOST_LINE)
            except Silent:
                self._going_on()
        line, _, self._said = self._said.partition(b"\n")
        return line

    def cut(self) -> None:
        """End it, from any thread."""
        self._call.close()

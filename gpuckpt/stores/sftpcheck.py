"""Whether what lies on a bare SFTP host is what the manifest says, by the best means that host has.

b3sum there, else SHA-256 there (where this side can read the same image again), else every byte is read back.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

import blake3

from gpuckpt.model.errors import ImageCorrupt
from gpuckpt.stores import farsums
from gpuckpt.stores.protocol import pieces_of
from gpuckpt.system.links import LinkLost, Silent
from gpuckpt.system.ssh import FAILED

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from gpuckpt.model.manifest import Part
    from gpuckpt.stores.protocol import Offer, Reader, Ticker
    from gpuckpt.stores.sftp import SftpStore
    from gpuckpt.stores.sftpfollowing import Following
    from gpuckpt.system.links import SocketLink
    from gpuckpt.system.ssh import Caller

AT_ONCE = 100
"""Names in one command line."""

MOST_ANSWER = 1 << 20
LOOK_SECONDS = 1.0
SLOWEST_DISK = 8 << 20
"""Bytes per second below which a program that reads them there counts as hung: it is silent until its end."""
WORTH_A_SESSION = 256 << 20
MOST_SESSIONS = 4
READ_BACK = "BLAKE3 of every byte, read back over SFTP"


def sha256_by(program: str) -> str:
    """By what a part was compared, in words."""
    return f"SHA-256 of every byte, by {program} there"


class Comparison:
    """One look at all parts of an image below `root`."""

    def __init__(self, store: SftpStore, root: bytes, parts: Sequence[Part], tick: Ticker) -> None:
        self._store, self._root, self._parts, self._tick = store, root, parts, tick
        self._hung = ""
        """Which program did not come to its end, in words."""
        self._refused = False
        """A connection to ask by was not to be had."""

    def bad_parts(self, source: Offer | None, following: Following | None = None) -> tuple[list[int], str]:
        """The parts that do not fit, and by what that was seen. Raises LinkLost.

        What `following` has compared, or is comparing, is not compared again where it fits. Raises ImageCorrupt where
        the source itself is damaged, and that was seen.
        """
        with self._store.busy:
            sized = [index for index, part in enumerate(self._parts) if self._has_size(part)]
        theirs = following.take_no_more() if following is not None else set()
        ours = [index for index in sized if index not in theirs]
        fitting, how = self._compare(ours, source) if ours or not theirs else ([], "")
        found, ways = set(fitting), [how]
        if following is not None:
            more, how = following.finish(self._tick)
            found |= more.intersection(sized)
            ways.append(how if more else "")
            left = [index for index in sized if index in theirs - more]
            if left:
                fitting, how = self._compare(left, source)
                found.update(fitting)
                ways.append(how)
        return sorted(set(range(len(self._parts))) - found), ", ".join(dict.fromkeys(way for way in ways if way))

    def _has_size(self, part: Part) -> bool:
        seen = self._store.first.look(self._root + b"/" + os.fsencode(part.path))
        return seen is not None and seen.is_file and seen.size == part.size

    def _compare(self, sized: Sequence[int], source: Offer | None) -> tuple[list[int], str]:
        by_programs = self.by_programs(sized, source)
        if by_programs is not None:
            return by_programs
        back = self._read_back(sized)
        fitting = [index for index in sized if back[index] == self._parts[index].blake3]
        return fitting, f"{READ_BACK}{self._hung}"

    def by_programs(self, sized: Sequence[int], source: Offer | None) -> tuple[list[int], str] | None:
        """Those of the parts that fit, by a program there; None where none can be run. Raises LinkLost."""
        there = self._sums(farsums.B3SUM, sized)
        if there is not None:
            return [index for index in sized if there[index] == self._parts[index].blake3], "b3sum there, every byte"
        for program in farsums.SHA256:
            both = self._sha256_on_both_sides(program, sized, source) if source is not None else None
            if both is not None:
                there, here = both
                return [index for index in sized if there[index] == here[index]], sha256_by(program)
        return None

    def _sums(self, program: str, wanted: Sequence[int]) -> dict[int, str] | None:
        """A digest for each part; None where the program may not or cannot run, or one of them did not end."""
        if program in self._store.without_programs or self._hung or self._refused:
            return None
        found: list[str] = []
        for at in range(0, len(wanted), AT_ONCE):
            names = [os.fsdecode(self._root) + "/" + self._parts[index].path for index in wanted[at : at + AT_ONCE]]
            size = sum(self._parts[index].size for index in wanted[at : at + AT_ONCE])
            limit = self._store.caller.stall_seconds + size / SLOWEST_DISK
            try:
                some, status = _sums_of(self._store.caller, program, names, limit, lambda: self._tick(0, 0))
            except TimeoutError:
                self._hung = f" ({program} there did not end within {limit:.0f} s)"
                return None
            if some is None and status in (None, FAILED):
                # No connection: now, while others carry the image, not for ever.
                self._refused = True
                return None
            if some is None:
                # No shell's "there is no such program": nothing is run there, and each question costs a connection.
                asked = status in (farsums.NOT_EXECUTABLE, farsums.NOT_FOUND)
                self._store.without_programs.update((program,) if asked else farsums.PROGRAMS)
                return None
            found += some
        return dict(zip(wanted, found, strict=True))

    def _sha256_on_both_sides(
        self, program: str, wanted: Sequence[int], source: Offer
    ) -> tuple[dict[int, str], dict[int, str]] | None:
        """At the same time: each side has cores of its own. None where the far side cannot."""
        if program in self._store.without_programs:
            return None
        with ThreadPoolExecutor(1) as pool:
            there = pool.submit(self._sums, program, wanted)
            try:
                here = dict(self._sha256_here(source, wanted, there))
            except _NotNeeded:
                here = {}
        sums = there.result()
        return None if sums is None else (sums, here)

    def _sha256_here(
        self, source: Offer, wanted: Sequence[int], there: Future[dict[int, str] | None]
    ) -> Iterator[tuple[int, str]]:
        """Digests of the parts here. Raises ImageCorrupt for one that is not as the manifest says.

        Both sides may have it damaged; and where only this one has, the other is not to blame.
        """
        reader = source.open_reader()
        try:
            for index in wanted:
                hasher, whole = hashlib.sha256(), blake3.blake3()
                for _, content in reader.stream(pieces_of(index, self._parts[index])):
                    if there.done() and there.result() is None:
                        raise _NotNeeded
                    hasher.update(content)
                    whole.update(content)
                    self._tick(0, 0)
                if whole.hexdigest() != self._parts[index].blake3:
                    raise ImageCorrupt(
                        f"part {self._parts[index].path} of {source.path} does not fit its manifest: damaged here",
                        "look at it with `gpuckpt inspect --verify`, push another image",
                    )
                yield index, hasher.hexdigest()
        finally:
            reader.close()

    def _read_back(self, wanted: Sequence[int]) -> dict[int, str]:
        """Over several sessions, each with parts of its own, the largest first."""
        queue = deque(sorted(wanted, key=lambda index: -self._parts[index].size))
        found: dict[int, str] = {}
        large = sum(self._parts[index].size > WORTH_A_SESSION for index in wanted)
        sessions = max(1, min(large, len(os.sched_getaffinity(0)), MOST_SESSIONS))
        # The sessions are opened one after another: the first is the one that is open already.
        readers = [self._store.reader(self._root, self._parts) for _ in range(sessions)]
        with ThreadPoolExecutor(sessions) as pool:
            for future in [pool.submit(self._hash_some, reader, queue, found) for reader in readers]:
                future.result()
        return found

    def _hash_some(self, reader: Reader, queue: deque[int], found: dict[int, str]) -> None:
        total = sum(part.size for part in self._parts)
        try:
            with contextlib.suppress(IndexError):
                while True:
                    index = queue.popleft()
                    hasher = blake3.blake3()
                    for _, content in reader.stream(pieces_of(index, self._parts[index])):
                        hasher.update(content)
                        self._tick(sum(self._parts[done].size for done in list(found)), total)
                    found[index] = hasher.hexdigest()
        finally:
            reader.close()


class _NotNeeded(Exception):
    """The other side has nothing to compare with."""


def _sums_of(
    caller: Caller, program: str, names: Sequence[str], limit_seconds: float, going_on: Callable[[], None]
) -> tuple[list[str] | None, int | None]:
    """What a program says of files, and its status. Raises TimeoutError."""
    call = caller.run(farsums.command_of(program, names), further=True, poll_seconds=LOOK_SECONDS)
    try:
        answer = _all_of(call.link, time.monotonic() + limit_seconds, going_on)
    finally:
        status, _ = call.end()
    return farsums.digests(answer, len(names)) if status == 0 else None, status


def _all_of(link: SocketLink, deadline: float, going_on: Callable[[], None]) -> bytes:
    """What a program says until its end. It may be silent for long; whether the line is alive is ssh's to see.

    Raises TimeoutError.
    """
    answer = b""
    while len(answer) < MOST_ANSWER:
        if time.monotonic() > deadline:
            raise TimeoutError
        try:
            answer += link.receive(MOST_ANSWER)
        except Silent:
            going_on()
        except LinkLost:
            break
    return answer

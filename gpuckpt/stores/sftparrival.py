"""An image on its way to a host with nothing but sshd.

It lies in NAME.partial as in a directory of this host (stores/landing.py), with a journal of its own for each
connection.
"""

from __future__ import annotations

import contextlib
import os
import posixpath
from typing import TYPE_CHECKING

from gpuckpt.model import manifest as manifests
from gpuckpt.model.errors import ImageCorrupt, MachineLacks, NotFound, Refused, in_words
from gpuckpt.stores import journal as journals
from gpuckpt.stores import landing, sftpcheck
from gpuckpt.stores.directory import sizes
from gpuckpt.stores.partialimage import PARTIAL_SUFFIX
from gpuckpt.stores.protocol import count_pieces
from gpuckpt.stores.sftpfollowing import WORTH_FOLLOWING, Following
from gpuckpt.stores.sftplanes import SftpWriter
from gpuckpt.stores.sftplock import LOCK, SftpLock
from gpuckpt.system.links import LinkLost
from gpuckpt.system.sftp import READ

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gpuckpt.stores.protocol import Offer, Ticker
    from gpuckpt.stores.sftp import SftpStore


class SftpArrival:
    """An image that arrives there."""

    def __init__(self, store: SftpStore, target: bytes, raw_manifest: bytes, source: Offer | None) -> None:
        self._store, self._raw, self._target, self._source = store, raw_manifest, target, source
        self._session = store.first
        self._parts = manifests.decode(raw_manifest, manifests.NAME).parts
        self.place = os.fsdecode(target)
        self.path = target + PARTIAL_SUFFIX.encode()
        self._held: dict[int, set[int]] = {}
        self._how = "nothing"
        self._following: Following | None = None
        self._looked_through = False
        """What is sent from now on is what did not fit."""
        self._lock = SftpLock(self._session, self.path, f"{store.where}:{self.place}")
        self.already = self._stands_there()
        if not self.already:
            self._begin()

    def _stands_there(self) -> bool:
        if self._session.look(self._target) is None:
            return False
        with contextlib.suppress(OSError):
            place = self._target + b"/" + manifests.NAME.encode()
            if self._session.read_small(place, manifests.MAX_BYTES) == self._raw:
                return True
        raise Refused(
            f"{self._store.where}:{self.place} exists already and is not this image",
            "choose another directory, or remove it",
        )

    def _begin(self) -> None:
        self._require_safe_parent()
        with contextlib.suppress(OSError):
            self._session.make_directory(self.path)
        seen = self._session.look(self.path)
        if seen is None or not seen.is_directory:
            what = "cannot be made" if seen is None else "is in the way and is no leftover of gpuckpt"
            raise MachineLacks(f"{self._store.where}:{os.fsdecode(self.path)} {what}", "choose another directory")
        self._lock.take()
        try:
            self._find_arrived()
            self._make_directories()
            self._link_neighbours()
            self._require_room()
        except BaseException:
            self._abandon()
            raise

    def _abandon(self) -> None:
        """Begun and refused: nothing stays but what had arrived before."""
        self.close()
        if not self._held:
            with contextlib.suppress(LinkLost, OSError):
                self._session.remove_tree(self.path)

    def _require_safe_parent(self) -> None:
        parent = self._session.look(posixpath.dirname(self._target), follow=True)
        if parent is None or not parent.is_directory:
            raise NotFound(f"{self._store.where}:{os.path.dirname(self.place)}: no such directory", "make it first")  # noqa: PTH120
        if parent.mode & 0o022 and not parent.mode & 0o1000:
            raise Refused(
                f"others can write to {os.path.dirname(self.place)} on {self._store.where}",  # noqa: PTH120
                "choose a directory that only its owner can write to",
            )

    def _find_arrived(self) -> None:
        journal = b""
        for entry in self._session.names(self.path):
            if entry.name.startswith(b"journal.") and entry.is_file and len(journal) < journals.MOST_JOURNAL:
                raw = self._session.read_small(self.path + b"/" + entry.name, journals.MOST_JOURNAL)
                journal += raw[: len(raw) - len(raw) % journals.RECORD.size]
        for index, pieces in journals.arrived(journal, self._parts).items():
            seen = self._session.look(self._place(index))
            if seen is not None and seen.is_file and seen.size <= self._parts[index].size:
                self._held[index] = pieces
        self._clear(self.path, b"")

    def _clear(self, directory: bytes, prefix: bytes) -> None:
        """Remove what is no part of this image, and parts that are not known to be there."""
        wanted = {os.fsencode(self._parts[index].path) for index in self._held}
        for entry in self._session.names(directory):
            name = prefix + entry.name
            place = directory + b"/" + entry.name
            if entry.is_directory:
                if any(part.startswith(name + b"/") for part in wanted):
                    self._clear(place, name + b"/")
                else:
                    self._session.remove_tree(place)
            elif name not in wanted and name != LOCK and not (name.startswith(b"journal.") and not prefix):
                self._session.remove_file(place)

    def _place(self, index: int) -> bytes:
        return self.path + b"/" + os.fsencode(self._parts[index].path)

    def _make_directories(self) -> None:
        needed: dict[bytes, None] = {}
        for part in self._parts:
            steps = os.fsencode(part.path).split(b"/")[:-1]
            needed.update(dict.fromkeys(b"/".join(steps[: end + 1]) for end in range(len(steps))))
        for name in needed:
            if self._session.look(self.path + b"/" + name) is None:
                self._session.make_directory(self.path + b"/" + name)

    def _link_neighbours(self) -> None:
        wanted = {
            os.fsencode(part.path.partition("/")[2]): index
            for index, part in enumerate(self._parts)
            if part.path.startswith("packs/") and part.path.endswith(".zst") and index not in self._held
        }
        parent = posixpath.dirname(self._target)
        for entry in self._session.names(parent) if wanted else ():
            if not entry.is_directory or entry.name.endswith(PARTIAL_SUFFIX.encode()):
                continue
            packs = parent + b"/" + entry.name + b"/packs"
            with contextlib.suppress(OSError):
                for pack in self._session.names(packs):
                    self._link(packs, pack.name, wanted, pack.size if pack.is_file else -1)

    def _link(self, packs: bytes, name: bytes, wanted: dict[bytes, int], size: int) -> None:
        index = wanted.get(name)
        if index is None or self._parts[index].size != size:
            return
        with contextlib.suppress(OSError):
            self._session.hard_link(packs + b"/" + name, self._place(index))
            self._held[index] = set(range(count_pieces(size)))
            del wanted[name]

    def _require_room(self) -> None:
        missing = self._missing()
        free = self._session.free_bytes(self.path)
        if free is not None and free < missing + landing.ROOM_BYTES:
            need = f"{(missing + landing.ROOM_BYTES) >> 20} MiB are needed, {free >> 20} MiB are free"
            raise Refused(f"{self._store.where}:{self.place} has no room: {need}", "make room there")

    def held(self) -> dict[int, Sequence[tuple[int, int]]]:
        """What is there already."""
        return {index: journals.ranges(pieces) for index, pieces in self._held.items()}

    def open_writer(self) -> SftpWriter:
        """Another stream."""
        if self._following is None and not self._looked_through and self._missing() >= WORTH_FOLLOWING:
            self._following = Following(self._store, self.path, self._parts, self._held, self._source)
        arrived = (self._following.arrived,) if self._following is not None else ()
        return SftpWriter(self._store, self._store.further(), self.path, self._parts, *arrived)

    def _missing(self) -> int:
        """Bytes that are not there."""
        return sizes(self._parts) - journals.held_bytes(self._parts, self.held())

    def verify(self, tick: Ticker) -> Sequence[int]:
        """Every byte, by what there is; drops and returns the parts that do not fit."""
        root = self._target if self.already else self.path
        comparison = sftpcheck.Comparison(self._store, root, self._parts, tick)
        bad, self._how = comparison.bad_parts(self._source, self._following)
        self._following, self._looked_through = None, True
        if bad and self.already:
            raise ImageCorrupt(
                f"part {self._parts[bad[0]].path} of {self.place} is damaged there", "remove it, push again"
            )
        with self._store.busy if bad else contextlib.nullcontext():
            for index in bad:
                self._session.remove_file(self._place(index))
            self._forget({journals.digest_bytes(self._parts[index]) for index in bad})
        return bad

    def _forget(self, dropped: set[bytes]) -> None:
        if not dropped:
            return
        kept = b""
        for entry in self._session.names(self.path):
            if entry.name.startswith(b"journal."):
                place = self.path + b"/" + entry.name
                kept += journals.without(self._session.read_small(place, journals.MOST_JOURNAL), dropped)
                self._session.remove_file(place)
        self._session.write_small(self.path + b"/journal.kept", kept)

    def publish(self) -> str:
        """Sync what SFTP can sync, and rename."""
        if not self.already:
            with self._store.busy:
                self._publish()
        return self._how

    def _publish(self) -> None:
        for index in range(len(self._parts)):
            self._session.beat()
            handle = self._session.open_file(self._place(index), READ)
            with contextlib.suppress(OSError):
                self._session.sync(handle)
            self._session.done(handle)
        signature = self._source.signature if self._source is not None else b""
        for name, content in ((manifests.SIGNATURE, signature), (manifests.NAME, self._raw)):
            if content:
                self._session.write_small(self.path + b"/" + name.encode(), content, sync=True)
        for entry in self._session.names(self.path):
            if entry.name.startswith(b"journal."):
                self._session.remove_file(self.path + b"/" + entry.name)
        self._lock.release()
        try:
            self._session.rename_to_new(self.path, self._target)
        except OSError as error:
            raise Refused(f"{self.place} cannot be put in place: {in_words(error)}", "look what is there") from None

    def close(self) -> None:
        """Let it go."""
        if self._following is not None:
            self._following.close()
        with contextlib.suppress(LinkLost, OSError):
            self._lock.release()

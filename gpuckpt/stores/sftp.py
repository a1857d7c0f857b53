"""A host with nothing but sshd as a store: SFTP alone, and b3sum or sha256sum where they may be run."""

from __future__ import annotations

import contextlib
import os
import posixpath
import threading
import time
from typing import TYPE_CHECKING

from gpuckpt.model import manifest as manifests
from gpuckpt.model import series
from gpuckpt.model.errors import ImageCorrupt, MachineLacks, NotFound
from gpuckpt.stores import farsums, sftpcheck
from gpuckpt.stores.directory import MAX_SIGNATURE_BYTES
from gpuckpt.stores.partialimage import PARTIAL_SUFFIX
from gpuckpt.stores.protocol import IsSeries
from gpuckpt.stores.series import leads_elsewhere
from gpuckpt.stores.sftparrival import SftpArrival
from gpuckpt.stores.sftplanes import SftpReader
from gpuckpt.stores.ssh import ONLY_SFTP
from gpuckpt.system.links import LinkLost
from gpuckpt.system.sftp import Sftp
from gpuckpt.system.ssh import FAILED
from gpuckpt.system.ssh_failures import explain, last_words

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gpuckpt.model.errors import GpuckptError
    from gpuckpt.model.manifest import Part
    from gpuckpt.stores.directory import Admit
    from gpuckpt.stores.protocol import Offer, Ticker
    from gpuckpt.system.ssh import Call, Caller


class SftpStore:
    """A bare SFTP host."""

    def __init__(self, caller: Caller, why: str = "", call: Call | None = None) -> None:
        """`why`: why there is no gpuckpt; `call`: its SFTP server is being called. Raises GpuckptError, LinkLost."""
        self.caller = caller
        self.where = caller.account.host
        self.why = why
        self.first = self._session(call or caller.sftp())
        self.without_programs = set(farsums.PROGRAMS if why == ONLY_SFTP else ())
        """What was tried and could not be run there."""
        self.busy = threading.Lock()
        """Held while the first session carries pieces or is asked something at length."""

    def _session(self, call: Call) -> Sftp:
        try:
            return Sftp(call)
        except (LinkLost, EOFError) as lost:
            status, text = call.end()
            if status == FAILED and "subsystem request failed" not in text:
                raise explain(self.caller, text) from None
            if status is None or status < 0:
                raise LinkLost(str(lost)) from None
            both = f"{self.where} has neither gpuckpt ({self.why}) nor SFTP ({last_words(text)})"
            raise MachineLacks(both, "install gpuckpt there, or name it with --remote-command") from None

    def further(self) -> Sftp:
        """The first session while it is idle, then others. Raises LinkLost, GpuckptError."""
        if self.busy.acquire(blocking=False):
            return self.first
        return self.another()

    def another(self) -> Sftp:
        """A session besides the first. Raises LinkLost, GpuckptError."""
        return self._session(self.caller.sftp(further=True))

    def give_back(self, session: Sftp) -> None:
        """A session that carries no pieces any more."""
        if session is self.first:
            self.busy.release()
        else:
            session.cut()

    def reader(self, root: bytes, parts: Sequence[Part]) -> SftpReader:
        """Another stream out of the directory `root`."""
        return SftpReader(self, self.further(), root, parts)

    def offer(self, path: str, admit: Admit | None = None) -> SftpOffer:
        """Open an image for reading."""
        return SftpOffer(self, self.absolute(path), admit)

    def receive(self, path: str, raw_manifest: bytes, source: Offer | None = None) -> SftpArrival:
        """Begin or go on with sending an image there."""
        return SftpArrival(self, self.absolute(path, make_parent=True), raw_manifest, source)

    def absolute(self, path: str, *, make_parent: bool = False) -> bytes:
        """The path from the root on; its last step stays a name. Raises NotFound, LinkLost."""
        raw = os.fsencode(posixpath.normpath(path or "."))
        parent, name = posixpath.split(raw)
        if make_parent and self.first.look(parent or b".", follow=True) is None:
            with contextlib.suppress(OSError):
                self.first.make_directory(parent)
        try:
            above = self.first.real_path(parent or b".")
        except OSError:
            raise NotFound(f"{self.where}: no directory {os.fsdecode(parent)}", "make it first") from None
        return posixpath.join(above, name)

    def keep_alive(self) -> None:
        """Touch the lock, where nothing else does."""
        if self.busy.acquire(blocking=False):
            try:
                self.first.beat()
            finally:
                self.busy.release()

    def round_trip_seconds(self) -> float:
        """Of one question."""
        with self.busy:
            begun = time.monotonic()
            self.first.real_path(b".")
            return time.monotonic() - begun

    def close(self) -> None:
        """End the first session."""
        self.first.cut()


def latest_in(session: Sftp, place: bytes) -> str:
    """What DIR/latest leads to; empty where there is no such link. Raises LinkLost."""
    with contextlib.suppress(OSError, EOFError):
        return os.fsdecode(session.read_link(place + b"/" + series.LATEST.encode()))
    return ""


def _behind_latest(session: Sftp, path: bytes) -> bytes:
    """As stores/series.py does it. Raises Refused, LinkLost."""
    above, name = posixpath.split(path)
    led_to = latest_in(session, above) if name == series.LATEST.encode() else ""
    if not led_to:
        return path
    image = posixpath.join(above, os.fsencode(led_to))
    if not series.names_one(led_to) or ((seen := session.look(image)) is not None and seen.is_link):
        raise leads_elsewhere(os.fsdecode(path), led_to)
    return image


class SftpOffer:
    """An image there."""

    def __init__(self, store: SftpStore, path: bytes, admit: Admit | None = None) -> None:
        self._store, self._path = store, _behind_latest(store.first, path)
        self.path = os.fsdecode(self._path)
        self.where = f"{store.where}:{self.path}"
        if self._path.endswith(PARTIAL_SUFFIX.encode()):
            raise ImageCorrupt(f"{self.where} is no complete image: a transfer that has not ended", "push again")
        self.raw_manifest = self._read_manifest()
        self.signature = self._read_signature()
        if admit is not None:
            admit(self.raw_manifest, self.signature)
        self.manifest = manifests.decode(self.raw_manifest, f"{self.where}/{manifests.NAME}")

    def _read_manifest(self) -> bytes:
        if self._store.first.look(self._path, follow=True) is None:
            raise NotFound(f"{self.where}: no such image", "name a directory that `gpuckpt dump` made")
        place = self._path + b"/" + manifests.NAME.encode()
        seen = self._store.first.look(place)
        if seen is None or not seen.is_file:
            raise self._no_manifest()
        return self._store.first.read_small(place, manifests.MAX_BYTES)

    def _no_manifest(self) -> GpuckptError:
        names: list[str] = []
        with contextlib.suppress(OSError):
            names = [os.fsdecode(entry.name) for entry in self._store.first.names(self._path)]
        newest = series.newest_of(names, latest_in(self._store.first, self._path))
        if newest and "criu" not in names:
            hint = f"name one of them; the newest is {self.where}/{newest}"
            return IsSeries(f"{self.where} is a series of images, not an image", hint, newest)
        return ImageCorrupt(f"{self.where} is no complete image: no {manifests.NAME} in it", "copy the image again")

    def _read_signature(self) -> bytes:
        place = self._path + b"/" + manifests.SIGNATURE.encode()
        seen = self._store.first.look(place)
        if seen is None or not seen.is_file or seen.size > MAX_SIGNATURE_BYTES:
            return b""
        return self._store.first.read_small(place, MAX_SIGNATURE_BYTES)

    def open_reader(self) -> SftpReader:
        """Another stream."""
        return self._store.reader(self._path, self.manifest.parts)

    def verify(self, tick: Ticker) -> str:
        """Every byte: by b3sum there, else read back. sha256sum has nothing here to be compared with."""
        bad, how = sftpcheck.Comparison(self._store, self._path, self.manifest.parts, tick).bad_parts(None)
        if bad:
            raise ImageCorrupt(f"part {self.manifest.parts[bad[0]].path} of {self.where} is damaged", "copy it again")
        return how

    def close(self) -> None:
        """The session goes with the store."""

"""An image on its way into a directory of this host: pieces in any order, resumable, published whole.

    NAME.partial/                 0700, locked (flock) by whoever takes it in
        incoming                  the manifest of the image that arrives
        token                     what further writers must know
        journal                   one record for each piece that has arrived: (BLAKE3 of its part, its number)
        compared                  of this run: packs that were hashed as they came
        criu/ packs/ files/       the parts, with holes where pieces are missing

A crash of this process loses nothing: what the kernel has taken in stays. After a crash of the host a journal
may name pieces that never reached the disk; each part is compared before it counts, and one that does not fit is
dropped and sent again. A pack that came whole in this run was hashed as it was written (`compared` says so, and which
change of which file that was); everything else is read. Packs that an older image beside it has are linked, not sent,
and compared all the same; so are the files of a job that moves, from NAME-files (flows/presending.py).
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from gpuckpt.model import manifest as manifests
from gpuckpt.model.errors import Busy, GpuckptError, ImageCorrupt, NotFound, Refused
from gpuckpt.model.migration import FILES, INCOMING_PLACE
from gpuckpt.stores import directory, partialimage
from gpuckpt.stores.journal import arrived, digest_bytes, held_bytes, ranges, without
from gpuckpt.stores.landingwriter import (
    INCOMING,
    JOURNAL,
    OWN,
    TOKEN,
    DirectoryWriter,
    compared_packs,
    decoded,
    partial_path,
    read_own,
    write_own,
)
from gpuckpt.stores.protocol import count_pieces
from gpuckpt.system.files import unsafe_places, user_of_files

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from gpuckpt.model.manifest import Part
    from gpuckpt.stores.protocol import Ticker

ROOM_BYTES = 16 << 20
"""What must stay free besides the image: directories, the journal."""

MOST_NEIGHBOURS = 1000
VERIFIED = "BLAKE3 of every byte, read back where it lies"
ARRIVED = "BLAKE3 of every byte, where it arrived"


class DirectoryArrival:
    """An image that arrives in a directory of this host."""

    resumable = True
    """What has arrived stays when it is broken off."""

    def __init__(
        self, target: Path, raw_manifest: bytes, without: frozenset[str] = frozenset(), signature: bytes = b""
    ) -> None:
        """`without`: parts that do not come, for an image that stays private and incomplete.

        Raises Busy, Refused, NotFound, ImageCorrupt, ImageTooNew, OSError.
        """
        self._raw = raw_manifest
        self._signature = signature[: directory.MAX_SIGNATURE_BYTES]
        self._without = without
        self._compared: frozenset[str] = frozenset()
        self.manifest = decoded(raw_manifest)
        self.place = str(target)
        self.token = secrets.token_hex(16)
        self._held: dict[int, set[int]] = {}
        self._partial: partialimage.PartialImage | None = None
        self.already = _stands_there(target, raw_manifest)
        if not self.already:
            self._begin(target)

    def _begin(self, target: Path) -> None:
        require_parent(target)
        self._partial = claim(target)
        try:
            self._prepare(self._partial.path)
            self._link_neighbours(self._partial.path, target)
            self._link_files(self._partial.path, target.with_name(f"{target.name}{FILES}"))
            self._require_room(self._partial.path)
        except BaseException:
            self.close()
            raise

    def _prepare(self, path: Path) -> None:
        self._held = self._find_arrived(path)
        _clear(path, {part.path for index, part in enumerate(self.manifest.parts) if index in self._held})
        for index, part in enumerate(self.manifest.parts):
            if part.path in self._without:
                self._held[index] = set(range(count_pieces(part.size)))
            (path / part.path).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_own(path / TOKEN, self.token.encode())
        write_own(path / INCOMING, self._raw)

    def _find_arrived(self, path: Path) -> dict[int, set[int]]:
        """What the journal names and is there; all, where a crash came between the manifest and the rename."""
        parts = self.manifest.parts
        if read_own(path / manifests.NAME) == self._raw:
            found = {index: set(range(count_pieces(part.size))) for index, part in enumerate(parts)}
        else:
            found = arrived(read_own(path / JOURNAL), parts)
        return {index: pieces for index, pieces in found.items() if _is_ours(path, parts[index])}

    def _link_neighbours(self, path: Path, target: Path) -> None:
        wanted = {
            index: part
            for index, part in enumerate(self.manifest.parts)
            if part.path.startswith("packs/") and part.path.endswith(".zst") and index not in self._held
        }
        for neighbour in _neighbours(target) if wanted else ():
            for index, part in list(wanted.items()):
                if _link(neighbour / part.path, path / part.path, part):
                    self._held[index] = set(range(count_pieces(part.size)))
                    del wanted[index]

    def _link_files(self, path: Path, sent_before: Path) -> None:
        """By their digests: they need not have the same numbers in both."""
        raw = read_own(sent_before / manifests.NAME)
        try:
            known = {(part.blake3, part.size): part.path for part in decoded(raw).parts} if raw else {}
        except GpuckptError:
            return  # something else that happens to have this name
        for index, part in enumerate(self.manifest.parts):
            there = known.get((part.blake3, part.size))
            if there is None or index in self._held or not part.path.startswith("files/"):
                continue
            if _link(sent_before / there, path / part.path, part):
                self._held[index] = set(range(count_pieces(part.size)))

    def _require_room(self, path: Path) -> None:
        missing = directory.sizes(self.manifest.parts) - held_bytes(self.manifest.parts, self.held())
        seen = os.statvfs(path)
        free = seen.f_bavail * seen.f_frsize
        if free < missing + ROOM_BYTES:
            need = f"{(missing + ROOM_BYTES) >> 20} MiB are needed, {free >> 20} MiB are free"
            raise Refused(f"{path.parent} has no room: {need}", "make room there, or choose another directory")

    def trust_packs(self) -> None:
        """The packs that are here were compared as they came, or when a neighbour did: not once more while a job waits.

        A restore compares each frame again before the job runs.
        """
        held = (self.manifest.parts[index].path for index in self._held)
        self._compared = frozenset(path for path in held if path.startswith("packs/") and path.endswith(".zst"))

    def held(self) -> dict[int, Sequence[tuple[int, int]]]:
        """What is there already."""
        return {index: ranges(pieces) for index, pieces in self._held.items()}

    def open_writer(self) -> DirectoryWriter:
        """Another stream."""
        return DirectoryWriter(Path(self.place), self.manifest, self.token)

    def verify(self, tick: Ticker) -> Sequence[int]:
        """Compare every byte with the manifest; drops and returns the parts that do not fit.

        What was compared as it was written, and is as it was then, is not read again.
        """
        if self._partial is None:
            _verify_published(Path(self.place), tick)
            return ()
        path, parts = self._partial.path, self.manifest.parts
        known = self._without | self._compared
        came = [index for index, part in enumerate(parts) if part.path not in known]
        fitting = _compare(path, [parts[index] for index in came], compared_packs(path, parts), tick)
        bad = [index for index, fits in zip(came, fitting, strict=True) if not fits]
        for index in bad:
            with contextlib.suppress(FileNotFoundError):
                (path / parts[index].path).unlink()
        if bad:
            dropped = {digest_bytes(parts[index]) for index in bad}
            write_own(path / JOURNAL, without(read_own(path / JOURNAL), dropped))
        return bad

    def publish(self, *, durable: bool = True) -> str:
        """Sync and rename. Without `durable` a crash of this host may cost it: whoever wants it to stay syncs it."""
        if self._partial is None:
            return VERIFIED
        partial, self._partial = self._partial, None
        try:
            for name in (manifests.NAME, manifests.SIGNATURE):
                with contextlib.suppress(FileNotFoundError):
                    (partial.path / name).unlink()
            if durable:
                partial.sync_parts()
            partial.write_manifest(self._raw, self._signature)
            for name in OWN:
                with contextlib.suppress(FileNotFoundError):
                    (partial.path / name).unlink()
            partial.put_in_place()
        except BaseException:
            with contextlib.suppress(OSError):
                os.close(partial.lock_fd)
            raise
        return ARRIVED

    def close(self) -> None:
        """Let it go; what has arrived stays, a directory without anything in it does not."""
        if self._partial is None:
            return
        empty = not read_own(self._partial.path / JOURNAL) and not any(self._held.values())
        if empty or not self.resumable:
            self._partial.discard()
        else:
            os.close(self._partial.lock_fd)
        self._partial = None


def _stands_there(target: Path, raw_manifest: bytes) -> bool:
    """The same image is complete there. Raises Refused for anything else of this name."""
    if not os.path.lexists(target):
        return False
    if target.is_dir() and read_own(target / manifests.NAME) == raw_manifest:
        return True
    raise Refused(f"{target} exists already and is not this image", "choose another directory, or remove it")


def make_parent(target: Path) -> bool:
    """Make the directory for an image where only its last step is missing; says whether it did. Raises NotFound."""
    parent = target.parent
    missing = not parent.is_dir()
    if missing:
        try:
            parent.mkdir(mode=0o700, parents=str(parent) == INCOMING_PLACE)
        except OSError as error:
            raise NotFound(f"{parent}: no such directory ({error.strerror})", "make it first") from None
    return missing


def require_parent(target: Path) -> None:
    """The directory for an image; it is made where only its last step is missing. Raises NotFound, Refused."""
    make_parent(target)
    parent = target.parent
    unsafe = unsafe_places(parent, user_of_files())
    if unsafe:
        raise Refused(
            f"others could exchange an image in {parent}: {unsafe[0]}",
            "choose a directory that only its owner can write to",
        )


def claim(target: Path) -> partialimage.PartialImage:
    """NAME.partial, ours alone: a transfer's leftover is gone on with, a killed dump's is removed."""
    path = partial_path(target)
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    if path.is_symlink() or not path.is_dir():
        raise Refused(f"{path} is in the way and is no leftover of gpuckpt", "remove it")
    try:
        partial = partialimage.PartialImage(target, path, partialimage.lock_partial(path))
    except Busy:
        raise Busy(f"another gpuckpt is taking in {path} right now", "wait for it to end") from None
    seen = path.stat()
    if seen.st_uid != user_of_files() or seen.st_mode & 0o077:
        os.close(partial.lock_fd)
        raise Refused(f"{path} is not only ours", "remove it")
    return partial


def _clear(path: Path, wanted: set[str]) -> None:
    """Remove all that does not belong to the image that arrives, and what of it is not known to be there."""
    for place in sorted(path.rglob("*"), reverse=True):
        name = str(place.relative_to(path))
        if place.is_symlink() or not place.is_dir():
            if name not in wanted and name != JOURNAL:
                place.unlink()
        elif not any(part.startswith(f"{name}/") for part in wanted):
            shutil.rmtree(place)


def _is_ours(path: Path, part: Part) -> bool:
    place = path / part.path
    try:
        seen = place.lstat()
    except OSError:
        return False
    return stat.S_ISREG(seen.st_mode) and seen.st_size <= part.size and not directory.has_link(place, part.path)


def _neighbours(target: Path) -> Iterator[Path]:
    """Published images in the same directory."""
    with os.scandir(target.parent) as entries:
        names = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)][:MOST_NEIGHBOURS]
    for name in sorted(names, reverse=True):
        if not name.endswith(partialimage.PARTIAL_SUFFIX) and (target.parent / name / manifests.NAME).is_file():
            yield target.parent / name


def _verify_published(target: Path, tick: Ticker) -> None:
    """Raises ImageCorrupt."""
    image = directory.open_image(target)
    try:
        total = directory.sizes(image.manifest.parts)
        directory.verify(image, lambda: tick(0, total))
    finally:
        image.close()


def _link(source: Path, target: Path, part: Part) -> bool:
    """Link a pack of the same name; its content is compared with all others at the end."""
    try:
        seen = source.lstat()
        safe = stat.S_ISREG(seen.st_mode) and not seen.st_mode & 0o022 and seen.st_uid in (0, user_of_files())
        if not safe or seen.st_size != part.size or source.parent.is_symlink():
            return False
        os.link(source, target, follow_symlinks=False)
    except OSError:
        return False
    return True


def _compare(path: Path, parts: Sequence[Part], compared: frozenset[str], tick: Ticker) -> Iterator[bool]:
    total, done = directory.sizes(parts), 0

    def fits(part: Part) -> bool:
        read = part.path not in compared
        try:
            directory.verify_part(path / part.path, part, lambda: tick(done, total), content=read)
        except ImageCorrupt:
            return False
        return True

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        try:
            for part, good in zip(parts, pool.map(fits, parts), strict=True):
                done += part.size
                yield good
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise

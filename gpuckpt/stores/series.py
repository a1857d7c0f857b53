"""The images of a series on this host's disk: the lock, what lies there, the link to the newest, removing.

    DIR/NAME-20261130T140526Z     an image; what else lies in DIR is not touched
    DIR/latest                    a link to the newest image that was dumped into DIR
    DIR/.NAME.lock                held while a dump goes into this series

What kill -9 leaves: a .partial, which the next dump into the series removes; a link that is one image behind, which
the next one sets right; the new link under its other name (.NAME.latest.new), as well.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import stat
import time
from collections.abc import Iterator, Mapping
from dataclasses import field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpuckpt.model import manifest as manifests
from gpuckpt.model import series
from gpuckpt.model.errors import Busy, GpuckptError, MachineLacks, NotFound, Refused
from gpuckpt.model.inspection import Copy
from gpuckpt.model.records import dataclass
from gpuckpt.model.series import File, Member, Space
from gpuckpt.stores import directory, partialimage, protection
from gpuckpt.stores.landingwriter import INCOMING

if TYPE_CHECKING:
    from gpuckpt.model.manifest import Manifest
    from gpuckpt.stores.directory import Admit

MOST_CARD_BYTES = 1000
OF_AN_IMAGE = (manifests.NAME, "criu")
"""What a directory with any name has that is an image: other programs have a manifest.json, too."""

LOOK = "look at it with `ls -ld`"


@dataclass(frozen=True, slots=True)
class Found:
    """An image as it was found. All but its name, place and files is unknown where it is damaged."""

    name: str
    path: Path
    damage: str = ""
    """Why it cannot be read as a whole; empty where it is: its manifest fits, and every part is there in its size."""
    files: dict[tuple[int, int], File] = field(default_factory=dict)
    created: float | None = None
    full_created: float = 0.0
    image_id: str = ""
    generation: int | None = None
    bytes_raw: int | None = None
    bytes_stored: int | None = None
    root_pid: int | None = None
    program: str = ""
    host: str = ""
    protected: tuple[Copy, ...] = ()

    @property
    def member(self) -> Member:
        """What the rules need to know."""
        return Member(self.name, self.created or 0.0, self.full_created, self.files)

    @property
    def bytes_on_disk(self) -> int:
        """Allocated for all its files."""
        return sum(file.bytes for file in self.files.values())

    @property
    def bytes_unshared(self) -> int:
        """What it adds on the disk: allocated for files that nothing else has a name for."""
        return series.gain([self.member])


def names_in(place: Path) -> list[str]:
    """All names in a directory. Raises NotFound, MachineLacks, Refused."""
    try:
        return sorted(os.listdir(place))  # noqa: PTH208 - names, not paths
    except FileNotFoundError:
        raise NotFound(f"{place}: there is no such directory", f"make it first: mkdir -p -m 700 {place}") from None
    except NotADirectoryError:
        raise NotFound(f"{place} is no directory", "name the directory of the series") from None
    except PermissionError:
        raise MachineLacks(f"{place} may not be read by this user", directory.AS_ROOT) from None
    except OSError as error:
        raise Refused(f"{place} cannot be read: {error.strerror}", LOOK) from None


def members_in(place: Path, name: str) -> list[str]:
    """The images of one series, oldest first: directories, no links, with a name of the series. Raises as names_in."""
    mine = (one for one in names_in(place) if (parsed := series.parse(one)) is not None and parsed[0] == name)
    return [one for one in mine if _is_directory(place / one)]


def images_in(place: Path) -> list[str]:
    """Whatever is, or should be, an image in a directory: of any series, or with a manifest. Raises as names_in."""
    return [one for one in names_in(place) if _is_directory(place / one) and _may_be_image(place / one)]


def _may_be_image(path: Path) -> bool:
    if path.name.endswith(partialimage.PARTIAL_SUFFIX):
        return False
    return series.parse(path.name) is not None or all(os.path.lexists(path / name) for name in OF_AN_IMAGE)


def _is_directory(path: Path) -> bool:
    try:
        return stat.S_ISDIR(path.lstat().st_mode)
    except OSError:
        return False


def look(path: Path, admit: Admit | None = None) -> Found:
    """Look at an image without reading its content. Never fails: what is wrong with it is part of the answer.

    One that `admit` does not let pass is named, and nothing of it is believed.
    """
    try:
        image = directory.open_image(path, admit)
    except GpuckptError as error:
        return Found(path.name, path, error.message, _files(path))
    try:
        seen = _sizes(image.root)
        damage = missing_part(image.manifest, seen)
        files = _files(image.root)
        return describe(path, image.manifest, damage, files, protection.read(image.root))
    except OSError as error:
        return Found(path.name, path, f"it cannot be read: {error.strerror}")
    finally:
        image.close()


def describe(
    path: Path,
    manifest: Manifest,
    damage: str,
    files: dict[tuple[int, int], File],
    protected: tuple[Copy, ...],
) -> Found:
    """What its manifest says of an image."""
    root = manifest.tree.processes[0]
    return Found(
        path.name,
        path,
        damage,
        files,
        created=manifest.created,
        full_created=manifest.full_created,
        image_id=manifest.image_id,
        generation=manifest.lineage.generation,
        bytes_raw=manifest.bytes_raw,
        bytes_stored=manifest.bytes_stored,
        root_pid=root.pid,
        program=" ".join(root.argv) or root.comm,
        host=manifest.host.hostname,
        protected=protected,
    )


def _walk(root: Path) -> Iterator[tuple[str, os.stat_result]]:
    """Every file below a directory: its path from there, and itself; links are not followed."""
    for where, _, names in os.walk(root):
        below = os.path.relpath(where, root)
        for name in names:
            path = name if below == "." else f"{below}/{name}"
            with contextlib.suppress(OSError):
                yield path, os.lstat(f"{where}/{name}")


def _sizes(root: Path) -> dict[str, int]:
    return {path: seen.st_size for path, seen in _walk(root) if stat.S_ISREG(seen.st_mode)}


def missing_part(manifest: Manifest, sizes: Mapping[str, int]) -> str:
    """The first part that is not there in its size, in words; empty where all are. `sizes`: path -> bytes."""
    for part in manifest.parts:
        if part.path not in sizes:
            return f"part {part.path} is missing"
        if sizes[part.path] != part.size:
            return f"part {part.path} has {sizes[part.path]} bytes, the manifest says {part.size}"
    return ""


def _files(root: Path) -> dict[tuple[int, int], File]:
    found: dict[tuple[int, int], File] = {}
    for _, seen in _walk(root):
        inode = (seen.st_dev, seen.st_ino)
        names = found[inode].names + 1 if inode in found else 1
        found[inode] = File(seen.st_blocks * 512, names, seen.st_nlink)
    return found


def space(place: Path) -> Space:
    """The file system of a directory. Raises OSError."""
    seen = os.statvfs(place)
    return Space(seen.f_bavail * seen.f_frsize, seen.f_blocks * seen.f_frsize)


@contextlib.contextmanager
def alone(place: Path, name: str) -> Iterator[None]:
    """Nobody else dumps into this series meanwhile. Raises Busy, NotFound, Refused, MachineLacks."""
    names_in(place)
    path = place / f".{name}.lock"
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    except PermissionError:
        raise MachineLacks(f"{place} may not be written by this user", directory.AS_ROOT) from None
    except OSError as error:
        raise Refused(f"{path} cannot be opened: {error.strerror}", LOOK) from None
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise Refused(f"{path} is no regular file", "remove it")
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise _busy(place / name, descriptor) from None
        _say_who(descriptor)
        yield
    finally:
        os.close(descriptor)


def _say_who(descriptor: int) -> None:
    card = json.dumps({"pid": os.getpid(), "since": time.time()}).encode()
    with contextlib.suppress(OSError):  # a full disk: only the words suffer
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, card, 0)


def _busy(where: Path, descriptor: int) -> Busy:
    card: Any = None
    with contextlib.suppress(OSError, ValueError):
        card = json.loads(os.pread(descriptor, MOST_CARD_BYTES, 0))
    who, since = "another gpuckpt dump", ""
    if isinstance(card, dict) and isinstance(card.get("pid"), int) and isinstance(card.get("since"), float):
        who = f"gpuckpt dump (pid {card['pid']})"
        with contextlib.suppress(OverflowError, OSError, ValueError):
            since = f" since {time.strftime('%H:%M:%S', time.localtime(card['since']))}"
    return Busy(f"{who} has been working on the series {where}{since}", "wait for it to end, then try again")


def clear_partials(place: Path, name: str) -> list[str]:
    """Remove what killed dumps, and killed removals, have left of this series; returns notes.

    An image on its way from another host stays: the transfer goes on from it.
    """
    notes = []
    for one in names_in(place):
        path, parsed = place / one, series.parse(one.removesuffix(partialimage.PARTIAL_SUFFIX))
        mine = one.endswith(partialimage.PARTIAL_SUFFIX) and parsed is not None and parsed[0] == name
        if not mine or not _is_directory(path) or os.path.lexists(path / INCOMING):
            continue
        try:
            notes.append(partialimage.remove_leftover(path))
        except Busy:
            continue  # one that is being made, without the series' lock
        except OSError as error:
            notes.append(f"{path}, which a killed run has left, could not be removed: {error.strerror}")
    return notes


def refuse_other_latest(place: Path) -> None:
    """Raise Refused where something stands at DIR/latest that is no link."""
    path = place / series.LATEST
    if os.path.lexists(path) and not path.is_symlink():
        raise Refused(f"{path} is no link to an image", "move it away: the link to the newest image goes there")


def behind_latest(path: Path) -> Path:
    """The image that DIR/latest leads to; any other path as it is. Raises Refused where it leads out of DIR."""
    led_to = directory.latest_in(path.parent) if path.name == series.LATEST else ""
    if not led_to:
        return path
    image = path.parent / led_to
    if not series.names_one(led_to) or image.is_symlink():
        raise leads_elsewhere(str(path), led_to)
    return image


def leads_elsewhere(path: str, led_to: str) -> Refused:
    """For a link to the newest image that `gpuckpt dump --into` has not made."""
    return Refused(f"{path} leads to {led_to[:1000]}, which is no image in that directory", "name the image itself")


def point_latest(place: Path, name: str, image: str) -> None:
    """Let DIR/latest lead to an image, in one step. Raises OSError, with the old link in place."""
    new = place / f".{name}.{series.LATEST}.new"
    with contextlib.suppress(FileNotFoundError):
        new.unlink()
    new.symlink_to(image)
    try:
        new.replace(place / series.LATEST)
    except OSError:
        new.unlink(missing_ok=True)
        raise
    partialimage.sync(place)


def remove(path: Path) -> None:
    """Remove an image that nobody has open. From the first step on it is none any more.

    Raises as open_for_removal: Busy, NotFound, ImageCorrupt; OSError.
    """
    image = directory.open_for_removal(path)
    try:
        directory.remove(image)
    finally:
        image.close()

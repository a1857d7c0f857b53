"""inspect DIR: the images of a directory. One that is damaged is a line with its reason, never the end of the list."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from gpuckpt.flows.admission import Admission
from gpuckpt.flows.interruption import BrokenOff
from gpuckpt.model import series
from gpuckpt.model.errors import GpuckptError, ImageCorrupt, Interrupted, Refused
from gpuckpt.model.inspection import ListedImage, ListedSeries, Listing
from gpuckpt.model.jsonform import to_json
from gpuckpt.model.manifest import NAME
from gpuckpt.model.records import dataclass
from gpuckpt.model.report import Event, Report
from gpuckpt.stores import directory
from gpuckpt.stores import series as stored

if TYPE_CHECKING:
    from pathlib import Path

    from gpuckpt.flows.interruption import Interruption
    from gpuckpt.flows.machine import Machine
    from gpuckpt.model.requests import InspectRequest
    from gpuckpt.stores.series import Found


def holds_images(place: Path) -> bool:
    """Whether this is a directory of images, and no image itself."""
    try:
        names = stored.names_in(place)
        return NAME not in names and "criu" not in names and bool(stored.images_in(place))
    except GpuckptError:
        return False  # who opens it as an image says why


def inspect(place: Path, request: InspectRequest, machine: Machine, interruption: Interruption) -> Report:
    """The images of a directory, by series, newest first."""
    of_one = {
        "--extract": request.extract,
        "--diff": request.diff,
        "--against": request.against,
    }
    for option in (name for name, value in of_one.items() if value):
        raise Refused(f"{place} is a directory of images, not an image", f"{option} takes one of them")
    try:
        admission = Admission.of(request.allowed_signers)
        if admission is not None:
            admission.require_ready()
        found = []
        for name in stored.images_in(place):
            interruption.check()
            found.append(stored.look(place / name, admission))
        if request.verify:
            machine.listener(Event("verify", "begin"))
            found = _verified(found, admission, interruption)
    except BrokenOff as trouble:
        if trouble.signal_number is None:
            raise ImageCorrupt(f"not verified: {trouble.why}") from None
        raise Interrupted(
            trouble.signal_number,
            f"broken off while {'verifying' if request.verify else 'looking'}",
            process="untouched",
        ) from None
    listed = listing(str(place), found, directory.latest_in(place), verified=request.verify)
    listed = replace(listed, bytes_on_disk=sum(file.bytes for file in _all_files(found).values()))
    return report(listed)


def report(listed: Listing) -> Report:
    """What is shown."""
    return Report("inspect", "ok", "untouched", {"kind": "series", **to_json(listed)})


def listing(place: str, found: list[Found], latest: str, *, verified: bool, disk_seen: bool = True) -> Listing:
    """Images as they were found, by series. Without `disk_seen` nobody knows which files of theirs are the same."""
    by_name: dict[str, list[Found]] = {}
    for one in found:
        parsed = series.parse(one.name)
        by_name.setdefault(parsed[0] if parsed is not None else "", []).append(one)
    manner = _Manner(place, latest, verified, disk_seen)
    return Listing(
        place,
        latest or None,
        tuple(ListedSeries(name, _images(members, manner)) for name, members in sorted(by_name.items())),
    )


@dataclass(frozen=True, slots=True)
class _Manner:
    """What all images of a directory have in common."""

    place: str
    latest: str
    verified: bool
    disk_seen: bool


def _verified(found: list[Found], admission: Admission | None, interruption: Interruption) -> list[Found]:
    """Every byte of every image is read, what several share once."""
    good: set[tuple[int, int, str]] = set()
    return [one if one.damage else _verify(one, admission, good, interruption) for one in found]


def _verify(
    found: Found, admission: Admission | None, good: set[tuple[int, int, str]], interruption: Interruption
) -> Found:
    try:
        image = directory.open_image(found.path, admission)
    except GpuckptError as error:
        return replace(found, damage=error.message)
    try:
        keys = {}
        for part in image.manifest.parts:
            seen = image.part(part.path).lstat()
            keys[part.path] = (seen.st_dev, seen.st_ino, part.blake3)
        known = frozenset(path for path, key in keys.items() if key in good)
        directory.verify(image, interruption.check, but=known, from_disk=True)
        good.update(keys.values())
    except GpuckptError as error:
        return replace(found, damage=error.message)
    except OSError as error:
        return replace(found, damage=f"it cannot be read: {error.strerror}")
    finally:
        image.close()
    return found


def _all_files(found: list[Found]) -> dict[tuple[int, int], series.File]:
    return {inode: file for one in found for inode, file in one.files.items()}


def _images(members: list[Found], manner: _Manner) -> tuple[ListedImage, ...]:
    """Newest first; those with other names by the time they were made."""
    ordered = sorted(members, key=lambda one: (series.parse(one.name) or ("", one.created or 0.0))[1])
    whole = [one for one in ordered if not one.damage] if manner.disk_seen else []
    behind = dict(zip((one.name for one in whole), series.copies([one.files for one in whole]), strict=True))
    return tuple(_image(one, behind.get(one.name), manner) for one in reversed(ordered))


def _image(found: Found, copies: int | None, manner: _Manner) -> ListedImage:
    return ListedImage(
        name=found.name,
        path=f"{manner.place}/{found.name}",
        image_id=found.image_id or None,
        created=found.created,
        complete=not found.damage,
        damage=found.damage or None,
        verified=(not found.damage) if manner.verified else None,
        latest=found.name == manner.latest,
        generation=found.generation,
        bytes_raw=found.bytes_raw,
        bytes_stored=found.bytes_stored,
        bytes_on_disk=found.bytes_on_disk if manner.disk_seen else None,
        bytes_unshared=found.bytes_unshared if manner.disk_seen else None,
        copies=copies,
        program=found.program or None,
        root_pid=found.root_pid,
        host=found.host or None,
        protected=found.protected,
    )

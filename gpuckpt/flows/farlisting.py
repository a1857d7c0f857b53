"""inspect user@host:DIR where DIR holds several images: the same list as on that host.

A far gpuckpt makes it there; over SFTP it is made here, of what can be seen that way.
"""

from __future__ import annotations

import json
from dataclasses import fields, replace
from typing import TYPE_CHECKING

from gpuckpt.flows import listing
from gpuckpt.model.errors import TransferFailed
from gpuckpt.model.inspection import ListedImage, Listing
from gpuckpt.model.jsonform import FormError, from_json
from gpuckpt.stores import frames
from gpuckpt.stores.ssh import SshStore

if TYPE_CHECKING:
    from gpuckpt.model.location import Location
    from gpuckpt.model.report import Report
    from gpuckpt.stores.protocol import Ticker
    from gpuckpt.stores.sftp import SftpStore

MOST_ANSWER = 64 << 20
LARGEST = 1 << 60
"""No size, count or time is larger."""


def inspect(store: SshStore | SftpStore, location: Location, tick: Ticker, *, verify: bool) -> Report | None:
    """The images of a directory there; None where it is no directory of several. Raises GpuckptError, LinkLost.

    `tick` is called while that takes long, and may raise to end it.
    """
    place = location.path.rstrip("/") or "/"
    if isinstance(store, SshStore):
        listed = _told(store, location.at(place), tick, verify=verify)
    else:
        listed = _seen(store, location.at(place), tick, verify=verify)
    return None if listed is None else listing.report(listed)


def _told(store: SshStore, location: Location, tick: Ticker, *, verify: bool) -> Listing | None:
    if frames.SERIES not in store.first.features:
        return None  # it says itself what it takes a series for
    question = {"do": "images", "path": location.path, "verify": verify}
    answer = bytes(store.question(question, most=MOST_ANSWER, tick=tick).payload)
    if not answer:
        return None
    try:
        listed = from_json(Listing, json.loads(answer))
        return _at(location, listed)
    except (ValueError, TypeError, RecursionError, FormError):
        raise TransferFailed(f"{location.host} tells nothing that can be read", "do not trust it") from None


def _at(location: Location, listed: Listing) -> Listing:
    """With places as they are reached from here. Raises ValueError for numbers that cannot be."""
    if not _possible(listed.bytes_on_disk) or not _possible(listed.left_out):
        raise ValueError(listed.path)
    for image in (image for one in listed.series for image in one.images):
        _require_possible(image)
    series = tuple(
        replace(one, images=tuple(replace(image, path=f"{location}/{image.name}") for image in one.images))
        for one in listed.series
    )
    return replace(listed, path=str(location), series=series)


def _require_possible(image: ListedImage) -> None:
    numbers = [getattr(image, item.name) for item in fields(image)] + [copy.time for copy in image.protected]
    if not all(_possible(number) for number in numbers if isinstance(number, (int, float))):
        raise ValueError(image.name)


def _possible(number: float | None) -> bool:
    return number is None or 0 <= number < LARGEST


def _seen(store: SftpStore, location: Location, tick: Ticker, *, verify: bool) -> Listing | None:
    from gpuckpt.stores import sftpseries  # noqa: PLC0415  paramiko takes 0.2 s to load

    seen = sftpseries.look(store, location.path, lambda: tick(0, 0), tick if verify else None)
    if seen is None:
        return None
    listed = listing.listing(str(location), list(seen.images), seen.latest, verified=verify, disk_seen=False)
    return replace(listed, left_out=seen.left_out)

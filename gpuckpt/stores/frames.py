"""What two gpuckpts say to each other: frames of a JSON object and, where there is one, a payload.

    b"gpck" | length of the JSON | length of the payload | JSON | payload

Both lengths are checked before a byte is set aside: the other side may be hostile. The serving side begins
with a line of its own; whatever a login shell printed before it is skipped.
"""

from __future__ import annotations

import json
import struct
from typing import TYPE_CHECKING, Any

import gpuckpt
from gpuckpt.model import errors, series
from gpuckpt.model.errors import GpuckptError
from gpuckpt.model.records import dataclass
from gpuckpt.stores.protocol import IsSeries
from gpuckpt.system.links import LinkLost

if TYPE_CHECKING:
    from gpuckpt.system.extents import Extent
    from gpuckpt.system.links import Link

MARK = b"\0GPUCKPT-SERVE\n"
"""What the serving side says first. No banner holds a zero byte."""

MOST_BANNER = 64 << 10
MOST_HEADER = 16 << 20
"""An image has thousands of parts, and each may have resume points of its own."""

SIGNATURES = "signatures"
"""The feature of those who keep an image's signature."""

SERIES = "series"
"""The feature of those who list the images of a directory, and say which one DIR/latest is."""

FEATURES = ("migrate", SIGNATURES, SERIES)
"""What a gpuckpt may offer beside storing images."""

VERSIONS = (1, 1)
"""The oldest and the newest protocol spoken here."""

_HEAD = struct.Struct(">4sII")
_MAGIC = b"gpck"
_KINDS = {kind.code: kind for kind in vars(errors).values() if isinstance(kind, type) and hasattr(kind, "code")}


class ProtocolBroken(Exception):
    """The other side does not keep to the protocol: no gpuckpt, or a hostile one."""


@dataclass(frozen=True, slots=True)
class Frame:
    """One message."""

    header: dict[str, Any]
    payload: memoryview


class Buffer:
    """Where payloads are received: grows to what is allowed and needed, and is used again."""

    def __init__(self) -> None:
        self._bytes = bytearray(0)

    def view(self, size: int) -> memoryview:
        """`size` bytes; what was in an earlier view is overwritten."""
        if len(self._bytes) < size:
            self._bytes = bytearray(size)
        return memoryview(self._bytes)[:size]


def send(link: Link, header: dict[str, Any], payload: bytes | memoryview | Extent = b"") -> None:
    """Send one message. Raises LinkLost."""
    text = json.dumps(header).encode()
    head = _HEAD.pack(_MAGIC, len(text), len(payload)) + text
    if payload:
        link.send(head, payload)
    else:
        link.send(head)


def receive(link: Link, buffer: Buffer, most_payload: int = 0) -> Frame:
    """Receive one message, which holds good until the buffer is used again. Raises LinkLost, ProtocolBroken."""
    head = bytearray(_HEAD.size)
    link.receive_into(memoryview(head))
    magic, text_size, payload_size = _HEAD.unpack(head)
    if magic != _MAGIC or text_size > MOST_HEADER:
        raise ProtocolBroken("no message of gpuckpt's")
    if payload_size > most_payload:
        raise ProtocolBroken(f"{payload_size} bytes where at most {most_payload} were asked for")
    text = bytearray(text_size)
    link.receive_into(memoryview(text))
    payload = buffer.view(payload_size)
    link.receive_into(payload)
    return Frame(_parsed(text), payload)


def _parsed(text: bytearray) -> dict[str, Any]:
    try:
        header = json.loads(text.decode("utf-8", "surrogateescape"))
    except (ValueError, RecursionError):
        raise ProtocolBroken("a message that is no JSON") from None
    if not isinstance(header, dict):
        raise ProtocolBroken("a message that is no object")
    return header


def await_mark(link: Link) -> bytes:
    """Skip what stands before the serving side's first word, and return it. Raises LinkLost, ProtocolBroken."""
    seen = bytearray()
    while not seen.endswith(MARK):
        if len(seen) > MOST_BANNER:
            raise ProtocolBroken(f"{MOST_BANNER >> 10} KiB of other text instead of gpuckpt's hello")
        try:
            # Byte by byte: what follows the mark belongs to the frames.
            seen += link.receive(1)
        except LinkLost as lost:
            raise LinkLost(str(lost) if not seen else f"{lost}, after {bytes(seen[:80])!r}") from None
    link.whole()
    return bytes(seen[: -len(MARK)])


def hello() -> dict[str, Any]:
    """What this side can do."""
    return {"gpuckpt": gpuckpt.__version__, "protocol": list(VERSIONS), "features": list(FEATURES)}


def common_version(theirs: Any) -> int | None:
    """The newest protocol both speak; None where there is none. Raises ProtocolBroken."""
    if not (isinstance(theirs, list) and len(theirs) == 2 and all(type(number) is int for number in theirs)):
        raise ProtocolBroken("a hello without a range of versions")
    newest = min(VERSIONS[1], theirs[1])
    return newest if newest >= max(VERSIONS[0], theirs[0]) else None


def failure_to_json(error: GpuckptError) -> dict[str, Any]:
    """A failure for the other side."""
    newest = {"newest": error.newest} if isinstance(error, IsSeries) else {}
    return {"error": {"code": error.code, "message": error.message, "hint": error.hint, **newest}}


def raise_failure(header: dict[str, Any], where: str = "") -> None:
    """Raise the failure that a message tells of, if it does; `where` is the other host's name."""
    told = header.get("error")
    if told is None:
        return
    told = told if isinstance(told, dict) else {}
    kind = _KINDS.get(str(told.get("code")), errors.TransferFailed)
    if kind in (GpuckptError, errors.Interrupted):
        kind = errors.TransferFailed
    place = f"on {where}: " if where else ""
    message, hint = f"{place}{str(told.get('message', ''))[:1000]}", str(told.get("hint", ""))[:1000]
    newest = told.get("newest")
    if kind is errors.Refused and isinstance(newest, str) and series.names_one(newest):
        raise IsSeries(message, hint, newest)
    raise kind(message, hint)

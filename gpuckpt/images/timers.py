"""A periodic timerfd that had expired when the tree was dumped: CRIU brings it back dead.

The kernel starts such a timer anew only when its expirations are read, and shows a remaining time of
zero until then. CRIU stores that zero and hands it to timerfd_settime(2), where zero means "off": the
program reads what had expired and then waits for ever. One nanosecond in its place lets the timer go on.
"""

from __future__ import annotations

from gpuckpt.images import criuformat, wire
from gpuckpt.model.errors import ImageCorrupt

_MAGIC = (wire.COMMON_MAGIC, 0x56303138)
"""files.img."""
_TIMERFD, _MEMBER = 17, 12
"""enum fd_types in fdinfo.proto, and where file_entry keeps the entry of a timerfd."""
_VALUE = (7, 8)
_INTERVAL = (9, 10)
"""Seconds and nanoseconds in timerfd.proto."""


def rearm(files_img: bytes, where: str = criuformat.FILES) -> bytes:
    """The files.img in which every such timer expires at once and then goes on; the rest is unchanged."""
    image = wire.split(files_img, _MAGIC, where)
    try:
        messages = tuple(_rearmed(message) for message in image.messages)
    except wire.Malformed as error:
        raise ImageCorrupt(f"{where}: {error}", "copy the image again, or restore another one") from None
    return wire.join(wire.ImageFile(image.magic, messages))


def _rearmed(message: bytes) -> bytes:
    fields = wire.decode(message)
    body = wire.chunk_of(fields, _MEMBER)
    if wire.number_of(fields, 1) != _TIMERFD or body is None:
        return message
    entry = wire.decode(body)
    is_periodic = any(wire.number_of(entry, number) for number in _INTERVAL)
    if not is_periodic or any(wire.number_of(entry, number) for number in _VALUE):
        return message
    armed = wire.chunk(_MEMBER, wire.encode(wire.integer(8, 1) if field.number == 8 else field for field in entry))
    return wire.encode(armed if field.number == _MEMBER else field for field in fields)

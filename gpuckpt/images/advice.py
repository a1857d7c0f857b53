"""Huge pages for the memory out of which the driver takes a GPU's memory back at a restore.

The driver reads its copy with one thread, and gives 16 GiB of pages of 4 KiB back to the kernel one by one: the CUDA
restore took 4.3 s out of those and 3.1 s out of huge ones (H200, driver 580.159.04, Linux 6.18). CRIU advises the
kernel about each mapping as the image says, before its memory is injected, so the image that it reads is made to say
it. The driver unmaps its copy afterwards: no mapping of the program is changed by it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpuckpt.images import memory, pagemaps, wire
from gpuckpt.model.errors import ImageCorrupt

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from gpuckpt.images.memory import Range

_MAPPINGS = 14
"""Where mm_entry of mm.proto keeps its vma_entry."""
_START, _END, _ADVICE = 1, 2, 9
_HUGE_PAGES = 1 << 14
"""MADV_HUGEPAGE: the bits are numbered as in madvise(2)."""


def advise_huge_pages(mm_img: bytes, ranges: Sequence[Range], where: str) -> bytes:
    """The mm image in which these ranges of private anonymous memory are advised; the rest is unchanged.

    A mapping of which only a part is meant becomes several, as it would by madvise(2). Raises ImageCorrupt.
    """
    image = wire.split(mm_img, pagemaps.MM_MAGIC, where)
    try:
        messages = tuple(wire.encode(_advised(message, ranges)) for message in image.messages)
    except wire.Malformed as error:
        raise ImageCorrupt(f"{where}: {error}", "copy the image again, or restore another one") from None
    return wire.join(wire.ImageFile(image.magic, messages))


def _advised(message: bytes, ranges: Sequence[Range]) -> Iterator[wire.Field]:
    for field in wire.decode(message):
        if field.number == _MAPPINGS and isinstance(field.value, bytes):
            yield from _parts(field, field.value, ranges)
        else:
            yield field


def _parts(field: wire.Field, body: bytes, ranges: Sequence[Range]) -> Iterator[wire.Field]:
    mapping = pagemaps.decode_mapping(body)
    whole = (mapping.start, mapping.end)
    outside = memory.without(whole, ranges) if memory.is_injectable(mapping) else (whole,)
    if outside == (whole,) or mapping.advice & _HUGE_PAGES:
        yield field
        return
    inside = memory.subtract([whole], outside)
    for start, end in sorted((*outside, *inside)):
        advice = mapping.advice | (_HUGE_PAGES if (start, end) in inside else 0)
        changed = {_START: start, _END: end, _ADVICE: advice}
        kept = [one for one in wire.decode(body) if one.number not in changed]
        yield wire.chunk(_MAPPINGS, wire.encode([*(wire.integer(*item) for item in changed.items()), *kept]))

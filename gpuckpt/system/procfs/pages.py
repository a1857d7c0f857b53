"""Which pages of a process CRIU will save: anonymous ones that are in memory or swapped out, and not the zero page.

The kernel is asked by the ioctl PAGEMAP_SCAN on /proc/PID/pagemap (Linux 6.7, Documentation/admin-guide/mm/pagemap.rst;
about 4 ms for a gigabyte). It skips what was never touched: reservations of terabytes cost nothing.
"""

from __future__ import annotations

import array
import fcntl
import os
import re
import struct

from gpuckpt.model.records import dataclass
from gpuckpt.system.procfs.reading import read_bytes

_PAGEMAP_SCAN = 0xC0606610
"""_IOWR('f', 16, struct pm_scan_arg), 96 bytes."""
_SCAN = struct.Struct("<12Q")
"""size, flags, start, end, walk_end, vec, vec_len, max_pages, category_inverted, _mask, _anyof_mask, return_mask."""
_FILE, _PRESENT, _SWAPPED, _ZERO_PAGE = 1 << 2, 1 << 3, 1 << 4, 1 << 5
_REGION_WORDS = 3
"""start, end, categories."""
_REGIONS = 1 << 15
_MAX_RUNS = 1 << 20
"""Memory in more pieces than this is not described: it would take longer than it is worth."""

_END_OF_USER_SPACE = (1 << 47) - 4096
_RANGE = re.compile(rb"^([0-9a-f]+)-([0-9a-f]+) ", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class PageLayout:
    """Where a process has memory of its own, in bytes, ascending."""

    mappings: list[tuple[int, int]]
    """Start and end of every mapping."""
    runs: list[tuple[int, int]]
    """Start and end of the pages to be saved; a run may span mappings that touch."""


def page_layout(pid: int) -> PageLayout | None:
    """The layout of a process that stands still; None when the kernel does not tell, or the process is gone.

    Never raises: it is a hint.
    """
    raw = read_bytes(f"/proc/{pid}/maps")
    if not raw:
        return None
    try:
        descriptor = os.open(f"/proc/{pid}/pagemap", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        runs = _scan(descriptor)
    except OSError:
        return None
    finally:
        os.close(descriptor)
    mappings = [(int(start, 16), int(end, 16)) for start, end in _RANGE.findall(raw)]
    return None if runs is None else PageLayout(mappings, runs)


def _scan(descriptor: int) -> list[tuple[int, int]] | None:
    regions = array.array("Q", bytes(8 * _REGION_WORDS * _REGIONS))
    place = regions.buffer_info()[0]
    runs: list[tuple[int, int]] = []
    at = 0
    while at < _END_OF_USER_SPACE and len(runs) < _MAX_RUNS:
        argument = bytearray(
            _SCAN.pack(
                *(_SCAN.size, 0, at, _END_OF_USER_SPACE, 0, place, _REGIONS, 0),
                *(_FILE | _ZERO_PAGE, _FILE | _ZERO_PAGE, _PRESENT | _SWAPPED, _FILE),
            )
        )
        count = fcntl.ioctl(descriptor, _PAGEMAP_SCAN, argument)
        found = regions[: count * _REGION_WORDS].tolist()
        runs.extend(zip(found[0::3], found[1::3], strict=True))
        walked = _SCAN.unpack(argument)[4]
        if walked <= at:
            break
        at = walked
    return runs if len(runs) < _MAX_RUNS else None

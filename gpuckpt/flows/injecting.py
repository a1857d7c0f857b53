"""Main's part of a restore that injects: decide what is injected, and write it while the owner holds the tree."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from gpuckpt.flows import leandir
from gpuckpt.images import filling, injection
from gpuckpt.images.memory import MemoryPlan
from gpuckpt.model.errors import GpuckptError, ImageCorrupt, RestoreFailed
from gpuckpt.system import hostsettings, memory_io

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from gpuckpt.flows.leandir import PackedMemory
    from gpuckpt.images.memory import Range
    from gpuckpt.model.manifest import Manifest


def worth_huge_pages(manifest: Manifest) -> dict[int, tuple[Range, ...]]:
    """What shall have huge pages, where the kernel gives them to who asks: the copies that the driver will read."""
    if not hostsettings.gives_huge_pages_if_asked():
        return {}
    return {one.id.pid: one.host_copies for one in manifest.cuda if one.host_copies}


def plan(
    packed: PackedMemory, criu: Path, owner_pid: int, huge: Mapping[int, Sequence[Range]], *, plain: bool
) -> tuple[MemoryPlan | None, str]:
    """What to inject (None: nothing), and why not where that is worth a note. Raises ImageCorrupt."""
    if plain:
        return None, ""
    why_not = memory_io.why_not(owner_pid)
    if why_not:
        return None, f"the memory was restored by CRIU alone: {why_not}"
    found = packed.plan(criu, huge)
    return (found, "") if found.bytes_injected >= leandir.WORTH_INJECTING else (None, "")


def worth_filling(plan: MemoryPlan | None, *, huge_pages: bool) -> tuple[int, ...]:
    """The processes, by their pids of the dump, into whose memory the owner shall make a way (images/filling.py).

    None where the kernel makes huge pages unasked: one of those costs less than 512 small ones.
    """
    if plan is None or huge_pages or hostsettings.makes_large_pages():
        return ()
    return filling.worth_filling(plan)


@dataclass(frozen=True)
class Held:
    """The held tree, as its owner tells of it."""

    owner_pid: int
    pids: Mapping[int, int]
    """Those of the dump, with those that the processes have here."""
    userfaults: Mapping[int, int]
    """Pid here -> the owner's descriptor (system/userfault.py)."""


def inject(packed: PackedMemory, what: MemoryPlan, held: Held, going_on: Callable[[], None]) -> int:
    """Write it all; returns how many bytes of it were filled into fresh pages.

    Raises ImageCorrupt, RestoreFailed, and what `going_on` raises.
    """
    try:
        what = MemoryPlan(tuple(replace(one, pid=_here(one.pid, held.pids)) for one in what.processes))
        doors = filling.open_doors(what, held.owner_pid, held.userfaults)
        try:
            return injection.inject(what, packed.index.files, packed.reader, going_on, doors)
        finally:
            for door in doors.values():
                door.close()
    except ImageCorrupt:
        raise
    except GpuckptError as lost:
        # Only an image elsewhere has others. Whatever status they have: a tree was being built.
        raise RestoreFailed(f"the memory did not come: {lost.message}", lost.hint) from None
    except ProcessLookupError:
        raise RestoreFailed("a process of the tree was ended by somebody while its memory was written") from None
    except OSError as error:
        raise RestoreFailed(
            f"the memory could not be written into the tree: {error.strerror}",
            "`gpuckpt restore --plain` lets CRIU restore it",
        ) from None


def _here(pid: int, pids: Mapping[int, int]) -> int:
    if pid not in pids:
        raise ProcessLookupError
    return pids[pid]

"""Main's part of a restore that injects: decide what is injected, and write it while the owner holds the tree."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from gpuckpt.flows import leandir
from gpuckpt.images import injection
from gpuckpt.images.memory import MemoryPlan
from gpuckpt.model.errors import GpuckptError, ImageCorrupt, RestoreFailed
from gpuckpt.system import memory_io

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from gpuckpt.flows.leandir import PackedMemory


def plan(packed: PackedMemory, criu: Path, owner_pid: int, *, plain: bool) -> tuple[MemoryPlan | None, str]:
    """What to inject (None: nothing), and why not where that is worth a note. Raises ImageCorrupt."""
    if plain:
        return None, ""
    why_not = memory_io.why_not(owner_pid)
    if why_not:
        return None, f"the memory was restored by CRIU alone: {why_not}"
    found = packed.plan(criu)
    return (found, "") if found.bytes_injected >= leandir.WORTH_INJECTING else (None, "")


def inject(packed: PackedMemory, what: MemoryPlan, pids: Mapping[int, int], going_on: Callable[[], None]) -> None:
    """Write it all; `pids` are those of the dump with those that the processes have here.

    Raises ImageCorrupt, RestoreFailed, and what `going_on` raises.
    """
    try:
        what = MemoryPlan(tuple(replace(one, pid=_here(one.pid, pids)) for one in what.processes))
        injection.inject(what, packed.index.files, packed.reader, going_on)
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

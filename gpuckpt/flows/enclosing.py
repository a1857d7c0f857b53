"""Namespaces of a restored tree: what is asked for, what CRIU sees of this host, what the report says."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from gpuckpt import checks
from gpuckpt.model.requests import NEW_NETWORK
from gpuckpt.owner.messages import Enclosed, OwnFile
from gpuckpt.system import namespaces

if TYPE_CHECKING:
    from pathlib import Path

    from gpuckpt.checks import RestoreFacts
    from gpuckpt.model.facts import ProcessId
    from gpuckpt.model.manifest import CapturedFile, Manifest
    from gpuckpt.model.requests import RestoreRequest
    from gpuckpt.owner.runs import Run

IMAGE, LEAN = "image", "lean"
"""In the run directory: where a CRIU with mounts of its own sees the image, and what was prepared of it."""


def pids_taken(request: RestoreRequest, manifest: Manifest) -> tuple[ProcessId, ...]:
    """What no other run may work on meanwhile: pids in a namespace of their own are nobody else's."""
    return () if request.own_pids else manifest.tree.ids


def planned_pids(request: RestoreRequest, manifest: Manifest) -> dict[str, Any]:
    """The pids it will have; in a namespace of its own those in there, for nobody knows yet those of this host."""
    pids = list(manifest.tree.pids)
    return {"namespace_pids": pids} if request.own_pids else {"root_pid": manifest.tree.root.pid, "pids": pids}


@dataclass
class Enclosing:
    """The namespaces of one restore."""

    facts: RestoreFacts
    run: Run
    shown: dict[str, str] = field(default_factory=dict)
    """Directories of this host -> where the tree's own mounts show them."""

    def show(self, name: str, place: Path) -> Path:
        """Where CRIU sees a directory: with pids of its own it has another /proc, as a clone another /dev/shm."""
        if not self.facts.request.own_pids:
            return place
        seen_as = self.run.directory / name
        seen_as.mkdir(mode=0o700)
        self.shown[str(place)] = str(seen_as)
        return seen_as

    def order(self) -> Enclosed | None:
        """The namespaces that this restore is to make."""
        request, name = self.facts.request, self.facts.request.named_network
        if not request.own_pids and not request.own_network:
            return None
        captured = self.facts.manifest.captured
        return Enclosed(
            pid=request.own_pids,
            net=request.own_network,
            netns=str(namespaces.network(name)) if name is not None else "",
            shm=request.clone,
            files=tuple(self._own_file(one) for one in captured if checks.has_own_place(self.facts, one.path)),
            binds=tuple(self.shown.items()),
            needed=tuple(sorted(checks.needed_ids(self.facts.manifest))),
            image=str(request.image if request.reach is None else request.reach.location),
        )

    def _own_file(self, one: CapturedFile) -> OwnFile:
        place = str(self.run.directory / IMAGE / one.part)
        further = one.linked_to if checks.has_own_place(self.facts, one.linked_to) else ""
        return OwnFile(place, one.path, further, one.mode, one.uid, one.gid, one.mtime_ns)

    def in_report(self, said: dict[str, Any]) -> dict[str, Any]:
        """What the report says of them; `clone_id` tells clones apart that know nothing of each other."""
        request = self.facts.request
        found: dict[str, Any] = dict(said.get("inside") or {})
        if request.own_network:
            found["netns"] = request.named_network or NEW_NETWORK
        if request.ports:
            found["ports"] = {str(old): new for old, new in request.ports.items()}
        return {**found, "clone_id": self.run.id} if request.clone else found

"""Main's part of bringing a tree up (steps 3 to 5 of restore.py): its talk with the owner, and the owner's end."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from gpuckpt.flows import injecting
from gpuckpt.flows.brokenoff import interrupted
from gpuckpt.flows.conversation import OWNER_KILLED, OwnerGone, OwnerSays, hear, repair_with_second_owner, tell
from gpuckpt.flows.interruption import BrokenOff
from gpuckpt.model.errors import GpuckptError, ImageCorrupt, MachineLacks, RestoredUnhealthy, RestoreFailed
from gpuckpt.owner import runs
from gpuckpt.owner.messages import PeerGone

if TYPE_CHECKING:
    from gpuckpt.flows.imagesource import ImageSource
    from gpuckpt.flows.interruption import Interruption
    from gpuckpt.flows.leandir import LeanDirectory, PackedMemory
    from gpuckpt.flows.machine import Machine
    from gpuckpt.images.framesource import FrameSource
    from gpuckpt.images.memory import MemoryPlan
    from gpuckpt.images.packindex import Index
    from gpuckpt.owner.handle import OwnerHandle, SpareOwner
    from gpuckpt.owner.messages import RestoreOrder
    from gpuckpt.owner.runs import Run


_BY_PID = ("pids", "userfaults")
"""What the owner's word `held` has for each pid; JSON knows no numbers as keys."""


class Departure(Protocol):
    """In a migration: who says when the tree that stands ready here may run."""

    transaction: str
    spare: SpareOwner | None
    """An owner that is there already."""

    def frames(self, source: FrameSource, index: Index) -> FrameSource:
        """The frames of the image, some of which may be here already."""

    def ready(self) -> None:
        """It stands ready; returns when it may run. Raises BrokenOff."""

    def running(self) -> None:
        """It runs."""


@dataclass
class BringUp:
    """One tree that the owner brings up."""

    source: ImageSource
    machine: Machine
    interruption: Interruption
    run: Run
    departure: Departure | None
    order: RestoreOrder
    packed: PackedMemory | None
    lean: LeanDirectory
    """What CRIU reads; where it has a plan that is written into the held tree."""
    notes: list[str] = field(default_factory=list)
    bytes_filled: int = 0
    """Of the injected ones: those that came into fresh pages (images/filling.py)."""
    something_is_left: bool = False
    """Of the tree, and it could not be ended."""

    def until_it_runs(self, owner: OwnerHandle) -> dict[str, Any]:
        """The owner's word that the tree is up. Raises GpuckptError with what became of it."""
        try:
            owner.give(self.order)
            if self.lean.plan is not None:
                held = hear(owner, ("held",), self.machine, self.interruption)
                pids, doors = ({int(number): found for number, found in held[what].items()} for what in _BY_PID)
                self._inject(owner, self.lean.plan, injecting.Held(owner.pid, pids, doors))
            if self.departure is not None:
                return self._depart(owner, self.departure)
            return hear(owner, ("restored",), self.machine, self.interruption)
        except BrokenOff as trouble:
            return self._abort(owner, trouble)
        except OwnerSays as last:
            raise self._error_from(last.message) from None
        except (OwnerGone, PeerGone):
            return self._repair()

    def _depart(self, owner: OwnerHandle, departure: Departure) -> dict[str, Any]:
        """Wait until the other host has given it away. From then on its owner decides, and nothing breaks it off."""
        hear(owner, ("prepared",), self.machine, self.interruption)
        departure.ready()
        tell(owner, "go")
        return hear(owner, ("restored",), self.machine)

    def _inject(self, owner: OwnerHandle, plan: MemoryPlan, held: injecting.Held) -> None:
        """Fill the held tree; where that fails the owner ends it, before an instruction of it has run."""
        assert self.packed is not None  # noqa: S101 - there is no plan without
        try:
            self.bytes_filled = injecting.inject(self.packed, plan, held, self._while_memory_comes)
        except (ImageCorrupt, RestoreFailed) as error:
            raise self._end_held(owner, error) from None
        tell(owner, "injected")

    def _while_memory_comes(self) -> None:
        self.interruption.check()
        self.source.show_progress()

    def _end_held(self, owner: OwnerHandle, error: GpuckptError) -> GpuckptError:
        """The error to raise once the owner has ended the tree."""
        with contextlib.suppress(OwnerGone):
            tell(owner, "abort")
        try:
            hear(owner, ("restored",), self.machine)
        except OwnerSays as last:
            if last.message["say"] != "failed" or last.message["left"]:
                return self._error_from(last.message)
        error.message += "; nothing is left behind"
        return error

    def _abort(self, owner: OwnerHandle, trouble: BrokenOff) -> dict[str, Any]:
        """Undo what can be undone. With --wait a signal that comes too late for that goes to the job."""
        try:
            tell(owner, "abort")
            said = hear(owner, ("restored",), self.machine)
        except OwnerSays as last:
            if last.message.get("left") or "left" not in last.message:
                raise self._error_from(last.message) from None
            cause = "" if last.message.get("broken_off") else last.message["message"]
            raise interrupted(trouble, "nothing is left behind", cause=cause) from None
        except OwnerGone:
            said = self._repair()
        if self.source.request.wait:
            return said
        root = said["tree"]["root"]["pid"]
        raise interrupted(trouble, f"it came too late: process {root} is restored and runs", restored=True) from None

    def _error_from(self, message: dict[str, Any]) -> GpuckptError:
        """The owner's last word as the error the user sees."""
        if message["say"] == "lacks":
            return MachineLacks(message["message"], message["hint"])
        if message["say"] == "crashed":
            self._repair()
            return RestoreFailed("the process that held the tree (the owner) failed")
        log = self.run.keep_log(Path(message["log"])) if message.get("log") else None
        hint = "; ".join(part for part in (message["hint"], f"CRIU's log: {log}" if log else "") if part)
        if message["left"]:
            self.something_is_left = True
            left = ", ".join(str(pid) for pid in message["left"])
            return RestoreFailed(f"{message['message']}; processes {left} could not be ended", hint, process="frozen")
        return RestoreFailed(message["message"], hint)

    def _repair(self) -> dict[str, Any]:
        """The owner is gone: a second one ends what was half built, or finds the tree whole."""
        request, tree = self.source.request, self.order.tree
        said = repair_with_second_owner(
            *(self.run, tree, self.machine),
            left_behind=str(self.run.directory),
            force_program=request.force_program,
        )
        alive = runs.came_alive(self.run.directory)
        if said is None or said["state"] == "frozen":
            self.something_is_left = True
            raise RestoreFailed(
                f"{OWNER_KILLED} after the tree came alive; whether all of it runs is not known"
                if alive
                else f"{OWNER_KILLED}, and what it left could not be ended",
                # In a pid namespace that pid is another's; any later restore ends what is half-built there.
                "repeat the command" if request.own_pids else f"run `gpuckpt restore --tree {tree.root.pid}`",
                process="frozen",
            )
        if said["state"] == "gone" and alive:
            why = f"{OWNER_KILLED}; the tree came alive and has ended since"
            raise RestoredUnhealthy(why, "its own output says why")
        if said["state"] == "gone" or said["duty"] != "nothing":
            try:
                self.interruption.check()  # what killed the owner may have been meant for all of us
            except BrokenOff as trouble:
                raise interrupted(trouble, "nothing is left behind") from None
            raise RestoreFailed(OWNER_KILLED)
        self.notes.append("the owner was killed after the tree came alive")
        ids = said["ids"]
        return {"tree": {"root": ids[0], "ids": ids, "stopped": [], "cuda": []}, "seconds": {}}

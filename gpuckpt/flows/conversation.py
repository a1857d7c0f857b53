"""Main's talk with the owner, and what to do when the owner dies in the middle of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gpuckpt.model.facts import ProcessId
from gpuckpt.model.jsonform import from_json
from gpuckpt.model.report import Event
from gpuckpt.owner.handle import OwnerHandle
from gpuckpt.owner.messages import Given, PeerGone, RepairOrder, Seen, TreeOrder

if TYPE_CHECKING:
    from collections.abc import Callable

    from gpuckpt.flows.interruption import Interruption
    from gpuckpt.flows.machine import Machine
    from gpuckpt.owner.runs import Run

STEP_SECONDS = 0.1
OWNER_KILLED = "the process that held the tree (the owner) was killed"
REAP_SECONDS = 5.0
LAST_WORDS = ("failed", "lacks", "crashed")


class OwnerGone(Exception):
    """The owner died without a last word."""


class OwnerSays(Exception):
    """The owner's last word was not the one hoped for: 'failed', 'lacks' or 'crashed', with its content."""

    def __init__(self, message: dict[str, Any]) -> None:
        super().__init__(message.get("say"))
        self.message = message


def hear(
    handle: OwnerHandle,
    words: tuple[str, ...],
    machine: Machine,
    interruption: Interruption | None = None,
    *,
    meanwhile: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Listen until the owner says one of `words`; phases become events, words that came too late are dropped.

    `meanwhile` is called every STEP_SECONDS and may raise.

    Raises OwnerSays for a bad last word, OwnerGone when it died, BrokenOff on a signal or the deadline.
    """
    while True:
        if interruption is not None:
            interruption.check()
        meanwhile()
        try:
            message = handle.channel.receive(STEP_SECONDS)
        except PeerGone:
            raise OwnerGone from None
        if message is None:
            continue
        for note in message.get("notes", ()):
            machine.listener(Event("host", "note", note))
        if message["say"] == "phase":
            machine.listener(Event(message["phase"], "begin"))
        elif message["say"] in words:
            return message
        elif message["say"] in LAST_WORDS:
            raise OwnerSays(message)


def tell(handle: OwnerHandle, word: str, **content: Any) -> None:
    """Say a word to the owner; raises OwnerGone when nobody hears it."""
    try:
        handle.say(word, **content)
    except PeerGone:
        raise OwnerGone from None


def repair_with_second_owner(
    run: Run,
    tree: TreeOrder,
    machine: Machine,
    *,
    left_behind: str | None,
    force_program: bool,
    given: Given = "resume",
) -> dict[str, Any] | None:
    """Let a fresh owner look at the tree and do what is right; its report, or None when it died too.

    `given`: what becomes of a tree that was given to another host, where the journal cannot know.
    """
    directory = run.directory / "repair"
    directory.mkdir(mode=0o700, exist_ok=True)
    order = RepairOrder(str(directory), left_behind, tree, None, force_program, given)
    with OwnerHandle(run) as handle:
        try:
            handle.give(order)
            return hear(handle, ("repaired",), machine)
        except (OwnerGone, OwnerSays, PeerGone):
            return None
        finally:
            handle.reap(REAP_SECONDS)


def seen_of(message: dict[str, Any]) -> tuple[Seen, ...]:
    """What the owner saw of each process."""
    return tuple(from_json(Seen, one) for one in message.get("seen", ()))


def words_for_seen(seen: tuple[Seen, ...], wanted: Callable[[Seen], bool] = lambda _: True) -> str:
    """'1234 running, 1240 frozen (CUDA checkpointed)'."""
    return ", ".join(
        f"{one.pid} {one.state}" + (f" ({one.detail})" if one.detail else "") for one in seen if wanted(one)
    )


def ids_from(data: list[dict[str, int]]) -> tuple[ProcessId, ...]:
    """Identities out of a message."""
    return tuple(from_json(ProcessId, one) for one in data)

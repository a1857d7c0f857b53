"""dump --into --push: the new image on another host, and the series there by the same rules, where gpuckpt is."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from gpuckpt.flows import far, transfer
from gpuckpt.flows.interruption import BrokenOff
from gpuckpt.flows.pruning import warning
from gpuckpt.model.errors import GpuckptError, TransferFailed
from gpuckpt.model.jsonform import FormError, from_json, to_json
from gpuckpt.model.report import Finding
from gpuckpt.model.requests import PushRequest
from gpuckpt.stores.ssh import SshStore
from gpuckpt.system.links import LinkLost

if TYPE_CHECKING:
    from pathlib import Path

    from gpuckpt.flows.interruption import Interruption
    from gpuckpt.flows.machine import Machine
    from gpuckpt.model.requests import Reach
    from gpuckpt.model.series import Rules

MOST_ANSWER = 1 << 20
KEPT = ("location", "bytes_sent", "bytes_skipped", "verified", "seconds")


def push(image: Path, reach: Reach, machine: Machine, interruption: Interruption) -> dict[str, Any]:
    """Copy the image; returns what came of it. Raises TransferFailed: the image here is complete whatever happens."""
    try:
        report = transfer.push(PushRequest(image, reach), machine.listener, interruption)
    except GpuckptError as error:
        raise _not_pushed(image, reach, error.message, error.hint) from None
    except BrokenOff as trouble:
        raise _not_pushed(image, reach, f"broken off: {trouble.why}", "") from None
    return {name: report.data.get(name) for name in KEPT}


def _not_pushed(image: Path, reach: Reach, why: str, hint: str) -> TransferFailed:
    words = f"{image} is complete here, but was not pushed to {reach.location}: {why}"
    again = f"`gpuckpt push {image} {reach.location}` pushes it"
    return TransferFailed(words, f"{hint}; {again}" if hint else again)


def settle(pushed: dict[str, Any], reach: Reach, name: str, rules: Rules) -> tuple[list[str], list[str], list[Finding]]:
    """Set DIR/latest there, and prune there; returns (removed, notes, findings). Raises nothing."""
    path = str(pushed["location"]).removeprefix(f"{reach.location.host}:")
    question = {"do": "series", "path": path, "name": name, "rules": to_json(rules)}
    try:
        store = far.connect_or_fail(reach)
        try:
            if not isinstance(store, SshStore):
                return [], [f"{reach.location.host} has no gpuckpt: nothing was removed there"], []
            return _checked(json.loads(bytes(store.question(question, most=MOST_ANSWER).payload)))
        finally:
            store.close()
    except (GpuckptError, LinkLost, ValueError, TypeError, KeyError, RecursionError, FormError) as error:
        hint = f"the copy is there; `gpuckpt inspect` on {reach.location.host} shows the series"
        return [], [], [warning("series-remote", "the series there by the same rules", str(error), hint)]


def _checked(said: dict[str, Any]) -> tuple[list[str], list[str], list[Finding]]:
    """What the other side has done, of the right types. Raises KeyError, TypeError, FormError."""
    removed, notes = ([str(word)[:1000] for word in list(said[key])[:1000]] for key in ("removed", "notes"))
    return removed, notes, [from_json(Finding, one) for one in list(said["findings"])[:10]]

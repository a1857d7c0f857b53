"""inspect --against: whether another host could restore an image that lies here, judged there with its own facts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from gpuckpt.flows import far
from gpuckpt.model.errors import MachineLacks, TransferFailed
from gpuckpt.model.jsonform import FormError, from_json, to_json
from gpuckpt.model.report import Finding
from gpuckpt.stores.ssh import SshStore
from gpuckpt.system.links import LinkLost

if TYPE_CHECKING:
    from gpuckpt.model.requests import Reach

MOST_ANSWER = 16 << 20
MOST_FINDINGS = 1000
SOMEWHERE = Path("/var/lib/gpuckpt/image")
"""Where the image is imagined to lie there."""


def ask(reach: Reach, raw_manifest: bytes) -> tuple[Finding, ...]:
    """Every restore check, as the other host judges it. Raises GpuckptError."""
    where = reach.location.host
    store = far.connect_or_fail(reach)
    try:
        if not isinstance(store, SshStore):
            raise MachineLacks(f"{where} has no gpuckpt to ask", "install gpuckpt there, or --remote-command")
        answer = store.question({"do": "judge"}, raw_manifest, most=MOST_ANSWER)
        told = json.loads(bytes(answer.payload))
        return tuple(from_json(Finding, one) for one in list(told["findings"])[:MOST_FINDINGS])
    except LinkLost as lost:
        raise TransferFailed(f"{where}: {lost}", "try again") from None
    except (ValueError, TypeError, KeyError, RecursionError, FormError):
        raise TransferFailed(f"{where} tells nothing that can be read", "do not trust it") from None
    finally:
        store.close()


def answer(raw_manifest: bytes) -> bytes:
    """The far side of `ask`: judges an image that is not here and may be hostile. Raises GpuckptError."""
    # Loaded where it is asked for: each connection of a push is a program of its own that has to start.
    from gpuckpt import checks  # noqa: PLC0415
    from gpuckpt.flows import gather  # noqa: PLC0415
    from gpuckpt.flows.machine import this_machine  # noqa: PLC0415
    from gpuckpt.model import manifest as manifests  # noqa: PLC0415
    from gpuckpt.model.requests import RestoreRequest  # noqa: PLC0415

    manifest = manifests.decode(raw_manifest, "the manifest")
    facts = gather.restore_facts(
        RestoreRequest(image=SOMEWHERE), manifest, this_machine(lambda _event: None), {}, reap_seconds=0
    )
    findings = checks.judge(checks.RESTORE_CHECKS, facts, frozenset())
    return json.dumps({"findings": to_json(findings)}).encode()

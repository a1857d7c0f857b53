"""inspect on another host: the host itself through its own gpuckpt, or an image there by its manifest."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from gpuckpt.flows import far, farlisting
from gpuckpt.flows.admission import Admission, signed_by
from gpuckpt.flows.interruption import BrokenOff
from gpuckpt.model.errors import ImageCorrupt, Interrupted, MachineLacks, Refused, TransferFailed
from gpuckpt.model.facts import Host
from gpuckpt.model.jsonform import FormError, from_json, to_json
from gpuckpt.model.redacted import is_encrypted
from gpuckpt.model.report import Event, Finding, Report
from gpuckpt.stores import frames
from gpuckpt.stores.ssh import SshStore
from gpuckpt.system.links import LinkLost

if TYPE_CHECKING:
    from gpuckpt.flows.interruption import Interruption
    from gpuckpt.flows.machine import Machine
    from gpuckpt.model.requests import InspectRequest, Reach
    from gpuckpt.stores.protocol import Offer
    from gpuckpt.stores.sftp import SftpStore

MOST_REPORT = 16 << 20
MOST_FINDINGS = 1000


def inspect(request: InspectRequest, reach: Reach, machine: Machine, interruption: Interruption) -> Report:
    """Describe a host, or an image on it. Raises GpuckptError."""
    store = far.connect_or_fail(reach)
    try:
        if not reach.location.path:
            return _host(store, reach)
        return _image(store, request, reach, machine, interruption)
    except LinkLost as lost:
        raise TransferFailed(f"{reach.location.host}: {lost}", "try again") from None
    finally:
        store.close()


def _image(
    store: SshStore | SftpStore, request: InspectRequest, reach: Reach, machine: Machine, interruption: Interruption
) -> Report:
    def tick(done: int, total: int) -> None:
        interruption.check()
        if total:
            machine.listener(Event("verify", "progress", done_bytes=done, total_bytes=total))

    admission = Admission.of(request.allowed_signers)
    if request.verify:
        machine.listener(Event("verify", "begin"))
    try:
        # A list of several is made there, of manifests that nobody here has seen signed: then it must be one image.
        several = None if admission else farlisting.inspect(store, reach.location, tick, verify=request.verify)
        if several is not None:
            return several
        offer = _offer(store, reach, admission)
        verified = offer.verify(tick) if request.verify else None
    except BrokenOff as trouble:
        raise Interrupted(trouble.signal_number or 2, "broken off while looking", process="untouched") from None
    data = {
        "kind": "image",
        "path": str(reach.location),
        "manifest": to_json(offer.manifest),
        "verified": True if verified else None,
        "verified_by": verified,
        "restorable": None,
        "encrypted": {"opened": False} if is_encrypted(offer.manifest) else None,
        "signed_by": signed_by(offer.raw_manifest, offer.signature, admission),
    }
    return Report("inspect", "ok", "untouched", data)


def _offer(store: SshStore | SftpStore, reach: Reach, admission: Admission | None) -> Offer:
    """An image there. Raises GpuckptError, LinkLost."""
    try:
        return store.offer(reach.location.path, admission)
    except ImageCorrupt as error:
        if admission is not None:
            several = "a directory of several images there is listed without --allowed-signers only"
            error.hint = f"{error.hint}; {several}" if error.hint else several
        raise
    except Refused as error:
        older = isinstance(store, SshStore) and frames.SERIES not in store.first.features
        if older and "series of images" in error.message:
            again = f"gpuckpt on {reach.location.host} is older and lists no series: install the same version there"
            error.hint = f"{error.hint}; {again}" if error.hint else again
        raise


def _host(store: SshStore | SftpStore, reach: Reach) -> Report:
    if not isinstance(store, SshStore):
        raise MachineLacks(
            f"{reach.location.host} has no gpuckpt to ask: it can store images, over SFTP",
            "install gpuckpt there, or name it with --remote-command",
        )
    answer = store.question({"do": "host"}, most=MOST_REPORT)
    try:
        report = json.loads(bytes(answer.payload))
        return _checked(report)
    except (ValueError, TypeError, KeyError, RecursionError, FormError):
        raise TransferFailed(f"{reach.location.host} tells nothing that can be read", "do not trust it") from None


def _checked(report: dict[str, Any]) -> Report:
    """What the other side says of itself, of the right types. Raises FormError, KeyError, TypeError, ValueError."""
    can = {str(name): value is True for name, value in dict(report["data"]["can"]).items()}
    data = {"kind": "host", "host": to_json(from_json(Host, report["data"]["host"])), "can": can}
    findings = tuple(from_json(Finding, finding) for finding in list(report["findings"])[:MOST_FINDINGS])
    return Report("inspect", "ok", "untouched", data, findings)

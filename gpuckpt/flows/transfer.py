"""push and pull: an image to another host, or from it.

    open the source -> connect -> what is there already, is there room -> pieces over K connections
    -> every byte verified where it arrived -> synced, renamed -> (push) protected.json, --delete-source -> Report

Until the rename nothing of this name is there but NAME.partial. A crash of either side, or of the line, leaves that and
its journal; the same command goes on from there. A line that breaks is connected again a few times by this very run.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from gpuckpt.flows import far, source
from gpuckpt.flows.admission import Admission
from gpuckpt.flows.attempts import Ends, Run
from gpuckpt.model.errors import ImageCorrupt, MachineLacks
from gpuckpt.model.redacted import is_encrypted
from gpuckpt.model.report import Event, Report
from gpuckpt.stores.local import DirectoryStore

if TYPE_CHECKING:
    from collections.abc import Callable

    from gpuckpt.flows.interruption import Interruption
    from gpuckpt.model.requests import PullRequest, PushRequest
    from gpuckpt.stores.protocol import Arrival, Offer, Store

    Listener = Callable[[Event], None]

FOR_RECIPIENTS = "the image is encrypted: who can read it there can read its secrets only with a recipient's key"
SECRETS = "the image holds the memory of the process, secrets included: who can read it there can read them"


def push(request: PushRequest, listener: Listener, interruption: Interruption) -> Report:
    """Copy an image to another host."""
    offer = DirectoryStore().offer(str(request.image))
    where = f"{request.reach.location.path or '.'}/{request.image.name}"
    try:
        run = Run(request.reach, listener, interruption)
        if request.verify_only:
            return _push_verified_only(run, offer.raw_manifest, where, request)

        def open_ends() -> Ends:
            store = far.connect(request.reach, run.pace)
            return run.ends(store, lambda: (offer, store.receive(where, offer.raw_manifest, offer)))

        place, verified = run.carry(open_ends)
        run.note(FOR_RECIPIENTS if is_encrypted(offer.manifest) else SECRETS)
        for words in source.protect(offer.image, request, place, verified):
            run.note(words)
        data = run.data(offer, f"{request.reach.location.host}:{place}", verified)
    finally:
        offer.close()
    if request.delete_source:
        source.delete(request, offer.manifest.image_id)
        data["deleted"] = str(request.image)
    return Report("push", "ok", "untouched", {"image": str(request.image), **data})


def pull(request: PullRequest, listener: Listener, interruption: Interruption) -> Report:
    """Copy an image from another host."""
    run = Run(request.reach, listener, interruption)
    kept: list[Offer] = []
    admission = Admission.of(request.allowed_signers)

    def open_ends() -> Ends:
        store = far.connect(request.reach, run.pace)

        def both() -> tuple[Offer, Arrival]:
            # The same one again, should DIR/latest lead to another by now.
            offer = _offered(store, kept[0].path if kept else request.reach.location.path, admission, request)
            kept[:] = [offer]
            target = request.directory / Path(offer.path).name
            return offer, DirectoryStore().receive(str(target), offer.raw_manifest, offer)

        return run.ends(store, both)

    if request.verify_only:
        return _pull_verified_only(run, request)
    place, verified = run.carry(open_ends)
    data = run.data(kept[0], place, verified)
    return Report("pull", "ok", "untouched", {"image": str(request.reach.location), **data})


def _offered(store: Store, path: str, admission: Admission | None, request: PullRequest) -> Offer:
    """The image, and its own name. Raises as store.offer, and MachineLacks where the other side does not say that."""
    with far.naming_newest("pull", request.reach.location, request.directory):
        offer = store.offer(path, admission)
    if not offer.path:
        host = request.reach.location.host
        raise MachineLacks(
            f"the gpuckpt on {host} is older and does not say which image {path} is",
            "name the image itself, or install the same version of gpuckpt on both hosts",
        )
    return offer


def _push_verified_only(run: Run, raw: bytes, where: str, request: PushRequest) -> Report:
    offer, verified = run.look_only(lambda store: store.offer(where))
    if offer.raw_manifest != raw:
        raise ImageCorrupt(f"{request.reach.location.at(where)} is another image than {request.image}", "push it again")
    data = run.data(offer, str(request.reach.location.at(where)), verified)
    return Report("push", "ok", "untouched", {"image": str(request.image), **data})


def _pull_verified_only(run: Run, request: PullRequest) -> Report:
    location = request.reach.location
    admission = Admission.of(request.allowed_signers)
    offer, verified = run.look_only(lambda store: _offered(store, location.path, admission, request))
    return Report("pull", "ok", "untouched", {"image": str(location), **run.data(offer, str(location), verified)})

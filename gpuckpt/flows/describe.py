"""inspect: what a target is and what can be done with it. It looks and judges; it never acts."""

from __future__ import annotations

import signal
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from gpuckpt import checks
from gpuckpt.flows import gather, listing, openfiles, unsealing, verifying
from gpuckpt.flows.admission import Admission, signed_by
from gpuckpt.flows.interruption import BrokenOff
from gpuckpt.flows.leandir import is_packed
from gpuckpt.flows.unsealing import View
from gpuckpt.model import manifest as manifests
from gpuckpt.model.errors import ImageCorrupt, Interrupted, Refused
from gpuckpt.model.jsonform import to_json
from gpuckpt.model.redacted import is_encrypted
from gpuckpt.model.report import Event, Finding, Report
from gpuckpt.model.requests import DumpRequest, RestoreRequest
from gpuckpt.owner import hostchanges, runs
from gpuckpt.stores import directory, protection

if TYPE_CHECKING:
    from collections.abc import Callable

    from gpuckpt.checks.facts import CapturedHere
    from gpuckpt.flows.interruption import Interruption
    from gpuckpt.flows.machine import Machine
    from gpuckpt.model.facts import Host, Tree
    from gpuckpt.model.requests import InspectRequest

T = TypeVar("T")

SOMEWHERE = Path("/var/lib/gpuckpt/image")
"""Where a dump is imagined to go when only the tree is looked at."""


def inspect(request: InspectRequest, machine: Machine, interruption: Interruption) -> Report:
    """Describe an image, a running tree, or this host."""
    if request.pid is not None:
        return _inspect_tree(request.pid, request, machine)
    if request.remote is not None:
        from gpuckpt.flows import elsewhere  # noqa: PLC0415  what few ask for is loaded for them

        return elsewhere.inspect(request, request.remote, machine, interruption)
    if request.target is not None and listing.holds_images(request.target):
        return listing.inspect(request.target, request, machine, interruption)
    if request.target is not None:
        return _inspect_image(request.target, request, machine, interruption)
    return _inspect_host(machine)


def _inspect_image(target: Path, request: InspectRequest, machine: Machine, interruption: Interruption) -> Report:
    admission = Admission.of(request.allowed_signers)
    view = _view(target, admission, request)
    image = view.image
    try:
        if request.verify:
            machine.listener(Event("verify", "begin"))
            _verify(view, interruption)
        _require_open(view, request)
        commands = _extract(view, request.extract, machine, interruption) if request.extract else []
        findings = _judge(view, request, machine, interruption)
        data = {
            "kind": "image",
            "path": str(target),
            "manifest": to_json(image.manifest),
            "verified": True if request.verify else None,
            "restorable": _verdict(findings) if view.is_open else None,
            "encrypted": None if view.is_plain else {"opened": view.is_open},
            "bytes_on_disk": view.stored.bytes_on_disk(),
            "signed_by": signed_by(view.stored.raw_manifest(), view.stored.signature, admission),
            "protected": to_json(protection.read(view.stored.root)),
            "extracted": {"path": str(request.extract), "commands": commands} if request.extract else None,
            **_asked_for(image, request, interruption),
        }
        return _report(data, findings, request)
    finally:
        view.close()


def _require_open(view: View, request: InspectRequest) -> None:
    """Without the key an image would seem to need nothing, and to differ in everything."""
    asked = {"--memory": request.memory, "--diff": request.diff, "--against": request.against}
    for option, value in asked.items():
        if value and not view.is_open:
            raise Refused(
                f"{option} needs all of {view.stored.path}, which is encrypted", "name a key: --identity FILE"
            )


def _view(target: Path, admission: Admission | None, request: InspectRequest) -> View:
    """Opened where there is a key; else an encrypted image shows what is not secret. Raises GpuckptError."""
    stored = directory.open_image(target, admission)
    if not is_encrypted(stored.manifest) or (request.identity is None and request.extract is None):
        return View(stored, stored)
    try:
        return unsealing.opened(stored, request.identity)
    except BaseException:
        stored.close()
        raise


def _report(data: dict[str, Any], findings: tuple[Finding, ...], request: InspectRequest) -> Report:
    """Looking succeeds whatever it sees; only who asks about another host gets its refusal as a status."""
    refusal = checks.refusal(findings) if request.against is not None else None
    if request.against is None or refusal is None:
        return Report("inspect", "ok", "untouched", data, findings)
    hint = f"see the checks, then ask again about {request.against.location.host}"
    return Report("inspect", "refused", "untouched", data, findings, Refused(refusal.message, hint))


def _judge(view: View, request: InspectRequest, machine: Machine, interruption: Interruption) -> tuple[Finding, ...]:
    """Every check of a restore, here or where it is asked about; nothing where what they need is sealed."""
    if not view.is_open:
        return ()
    image = view.image
    if request.against is not None:
        from gpuckpt.flows import judging  # noqa: PLC0415

        return judging.ask(request.against, manifests.encode(image.manifest))
    here = _compare(image, interruption)
    facts = gather.restore_facts(RestoreRequest(image=image.path), image.manifest, machine, here, reap_seconds=0)
    return checks.judge(checks.RESTORE_CHECKS, facts, frozenset())


def _asked_for(image: directory.Image, request: InspectRequest, interruption: Interruption) -> dict[str, Any]:
    """What is looked at only where somebody wants to see it."""
    found: dict[str, Any] = {}
    if request.against is not None:
        found["against"] = str(request.against.location)
    if request.memory or request.diff is not None:
        from gpuckpt.flows import comparing  # noqa: PLC0415

        if request.memory:
            found["memory"] = to_json(_unless_broken_off(lambda: comparing.picture(image, interruption.check)))
        if request.diff is not None:
            with closing(_other(request.diff, request)) as other:
                compared = _unless_broken_off(lambda: comparing.compare(image, other.image, interruption.check))
            found["diff"] = to_json(compared)
    return found


def _other(path: Path, request: InspectRequest) -> View:
    """The image that another is compared with, opened by the same key where it needs one. Raises GpuckptError."""
    stored = directory.open_image(path, Admission.of(request.allowed_signers))
    if not is_encrypted(stored.manifest):
        return View(stored, stored)
    try:
        return unsealing.opened(stored, request.identity)
    except BaseException:
        stored.close()
        raise


def _unless_broken_off(look: Callable[[], T]) -> T:
    try:
        return look()
    except BrokenOff as trouble:
        number = trouble.signal_number or signal.SIGINT
        raise Interrupted(number, "broken off while looking at the memory", process="untouched") from None


def _extract(view: View, target: Path, machine: Machine, interruption: Interruption) -> list[str]:
    from gpuckpt.flows import extract as extracting  # noqa: PLC0415

    machine.listener(Event("extract", "begin"))
    try:
        return extracting.extract(view, target, interruption)
    except BrokenOff as trouble:
        number = trouble.signal_number or signal.SIGINT
        raise Interrupted(number, "broken off; what was extracted is removed", process="untouched") from None
    except OSError as error:
        raise Refused(f"{target} cannot be written: {error.strerror}", "choose a directory with room") from None


def _compare(image: directory.Image, interruption: Interruption) -> dict[str, CapturedHere]:
    try:
        return openfiles.compare(image, interruption.check)
    except BrokenOff as trouble:
        number = trouble.signal_number or signal.SIGINT
        raise Interrupted(number, "broken off while files were compared", process="untouched") from None


def _verify(view: View, interruption: Interruption) -> None:
    """Every byte as it is stored; what a key can open, it must open, too."""
    try:
        directory.verify(view.stored, interruption.check)
        if view.place is not None and is_packed(view.image):
            verifying.verify_frames(view, interruption)
    except BrokenOff as trouble:
        if trouble.signal_number is None:
            raise ImageCorrupt(f"not verified: {trouble.why}") from None
        raise Interrupted(trouble.signal_number, "broken off while verifying", process="untouched") from None


def _verdict(findings: tuple[Finding, ...]) -> str:
    """'no' when a check blocks, 'unknown' when a blocking check could not tell, else 'yes'."""
    if checks.blocking(findings):
        return "no"
    return "unknown" if any(f.verdict == "unknown" and f.severity == "block" for f in findings) else "yes"


def _inspect_tree(pid: int, request: InspectRequest, machine: Machine) -> Report:
    facts = gather.dump_facts(DumpRequest(pid=pid, image=SOMEWHERE, keep_argv=request.keep_argv), machine)
    about_the_tree = tuple(check for check in checks.DUMP_CHECKS if not check.id.startswith(("image-", "disk-")))
    findings = checks.judge(about_the_tree, facts, frozenset())
    leftover = runs.leftover_of(facts.tree.root)
    # A dump refuses it until it was repaired; what an interrupted run left running is cleared by the dump.
    held = leftover is not None and any(process.state in ("T", "t") for process in facts.tree.processes)
    data: dict[str, Any] = {
        "kind": "process",
        "tree": to_json(facts.tree),
        "host": to_json(facts.host),
        "dumpable": "no" if held or checks.blocking(findings) else "yes",
        "estimate_bytes": estimate_bytes(facts.tree),
        "interrupted": None if leftover is None else _interrupted(leftover),
    }
    return Report("inspect", "ok", "untouched", data, findings)


def _interrupted(leftover: runs.Leftover) -> dict[str, Any]:
    """What held the tree. One that was given away is another's to end: who resumes it here must know that."""
    return {"operation": leftover.operation, "since": leftover.since, "given_to": leftover.given_to}


def estimate_bytes(tree: Tree) -> int:
    """Roughly what an image would hold: memory, swap, GPU memory."""
    memory = sum(process.rss_bytes + process.swap_bytes for process in tree.processes)
    return memory + sum(use.memory_bytes or 0 for use in tree.gpu_uses)


def _inspect_host(machine: Machine) -> Report:
    here = gather.host(machine, SOMEWHERE)
    findings = checks.judge(checks.HOST_CHECKS, checks.HostFacts(here, hostchanges.left_by_dead()), frozenset())
    data = {"kind": "host", "host": to_json(here), "can": _abilities(here)}
    return Report("inspect", "ok", "untouched", data, findings)


def _abilities(here: Host) -> dict[str, bool]:
    works = here.privileged and bool(here.criu.check_ok)
    return {"dump": works, "restore": works, "gpu": works and here.gpu.interface != "none" and bool(here.gpu.gpus)}

"""migrate: one job to another host, as one transaction.

    hello -> facts here, restore checks there, against a draft of the manifest -> (--dry-run stops here)
    -> dump, held at CRIU's gate -> the image is there, verified -> restored there, held (`prepared`)
    -> the owner here journals `given` -> go -> it runs there, is watched -> the gate opens, the tree here ends

steps, and what kill -9 of this process at each leaves (there: flows/receiving.py; the owner: owner/giving.py):

1. judge                    nothing was touched
2. capture, transfer        the owner sees the end of file, CRIU undoes its work, the tree goes on here
3. prepare                  as 2; there the end of the connection ends the copy, which has not run
4. given, go                held here: nobody knows whether `go` was sent. `gpuckpt inspect --tree` says so
5. runs there, watched      the owner ends the tree here
6. commit                   as 5

A lost link, or a gpuckpt that is lost there, is as 2 or 3 up to `go`. A `go` without an answer is asked about over a
new connection, and by that taken back where it did not come in time; only where no connection comes is it status 51.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpuckpt import checks
from gpuckpt.checks.image import DISK_SPACE
from gpuckpt.flows import capturing, carrying, draft, gather, hooks, presending, seeding, tidying, workdirs
from gpuckpt.flows import repair as repairing
from gpuckpt.flows.destination import Destination, Look
from gpuckpt.flows.handover import MigrateWork, as_interrupted, discard_there, require_going_on
from gpuckpt.flows.interruption import Interruption
from gpuckpt.model.errors import LOST, GpuckptError
from gpuckpt.model.migration import FILES, SEED, Terms
from gpuckpt.model.records import dataclass
from gpuckpt.model.report import Event, Report
from gpuckpt.model.requests import DumpRequest, TreeRequest
from gpuckpt.owner import runs
from gpuckpt.system import procfs

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from gpuckpt.checks.facts import DumpFacts
    from gpuckpt.flows.destination import Judged
    from gpuckpt.flows.machine import Machine
    from gpuckpt.flows.seeding import Seed
    from gpuckpt.flows.workdirs import Below
    from gpuckpt.model.report import Finding
    from gpuckpt.model.requests import MigrateRequest

SPOOL = Path("/var/lib/gpuckpt/outgoing")


def migrate(request: MigrateRequest, machine: Machine, interruption: Interruption) -> Report:
    """Move the tree. Raises GpuckptError with what became of it."""
    runs.refuse_busy(procfs.tree_ids(gather.identify(request.pid)))
    transaction = secrets.token_hex(16)
    dump_request = _dump_request(request, transaction)
    _make_spool(dump_request.image.parent, request)
    with contextlib.ExitStack() as stack:

        def look() -> Look:
            return _look(request, dump_request, transaction, machine, interruption, stack)

        seen = look()
        findings = hooks.before_it(seen.findings, "migrate", request.hooks)
        refusal = checks.refusal(findings)
        if refusal is not None:
            return Report("migrate", "refused", "untouched", seen.plan, findings, refusal)
        if request.dry_run:
            speed = seen.there.bytes_per_second(lambda: require_going_on(interruption))
            plan = {**seen.plan, "estimate": draft.estimate(seen.facts, speed)}
            return Report("migrate", "planned", "untouched", plan, findings)
        if not request.pre_seed and not draft.large_files(seen.facts):
            return _carry_out(request, dump_request, _Sent(seen), machine, interruption, look)
        try:
            sent = _send_before(request, dump_request, seen, machine, interruption, stack, look)
        except GpuckptError as error:
            if error.process not in LOST:
                discard_there(request.reach, seen.terms)
            raise
        return _carry_out(request, dump_request, sent, machine, interruption, look)


@dataclass(frozen=True, slots=True)
class _Sent:
    """What was sent before the job stands still, and both hosts as they were seen then."""

    seen: Look
    seed: Seed | None = None
    files: dict[str, Any] | None = None


def _send_before(
    request: MigrateRequest,
    dump_request: DumpRequest,
    seen: Look,
    machine: Machine,
    interruption: Interruption,
    stack: contextlib.ExitStack,
    look: Callable[[], Look],
) -> _Sent:
    """Send what is worth it, and look again: the tree ran on, and so did the other host. Raises GpuckptError."""
    seen.there.close()
    seed, files = None, None
    if request.pre_seed:
        seed = seeding.sow(request, dump_request, seen.terms.seed, machine, interruption)
        stack.callback(seed.close)
    if draft.large_files(seen.facts):
        files = presending.send(request, dump_request, seen, machine, interruption)
    seen = look()
    refusal = checks.refusal(hooks.before_it(seen.findings, "migrate", request.hooks))
    if refusal is not None:
        raise refusal
    return _Sent(seen, seed, files)


def _look(
    request: MigrateRequest,
    dump_request: DumpRequest,
    transaction: str,
    machine: Machine,
    interruption: Interruption,
    stack: contextlib.ExitStack,
) -> Look:

    def going_on() -> None:
        require_going_on(interruption)

    facts = gather.dump_facts(dump_request, machine)
    below = workdirs.look(facts.tree, request.carry_files, str(dump_request.image), going_on)
    facts = replace(facts, tree=workdirs.with_files(facts.tree, below))
    machine.listener(Event("judge", "begin"))
    there = Destination(request.reach, going_on)
    stack.callback(there.close)
    terms, judged = _judged(request, facts, below, there, transaction, going_on)
    findings = (
        *checks.judge(_dump_checks(request, facts), facts, request.allow),
        *(_named(finding, there.where) for finding in judged.findings),
        *draft.room(facts, judged, there.where),
        *workdirs.finding(below),
    )
    pids = list(facts.tree.pids)
    plan = {
        **hooks.planned("migrate", request.hooks),
        "root_pid": request.pid,
        "pids": pids,
        "to": there.where,
        "place": judged.place,
        "working_directories": [one.to_json() for one in below],
    }
    return Look(facts, there, terms, findings, plan)


def _dump_checks(request: MigrateRequest, facts: DumpFacts) -> tuple[checks.Check[DumpFacts], ...]:
    """Where nothing of the memory is stored here, no room is needed for it."""
    stored = request.keep_image is not None or request.pre_seed or capturing.why_not_streamed(facts.host.criu)
    return tuple(check for check in checks.DUMP_CHECKS if stored or check is not DISK_SPACE)


def _carry_out(
    request: MigrateRequest,
    dump_request: DumpRequest,
    sent: _Sent,
    machine: Machine,
    interruption: Interruption,
    look: Callable[[], Look],
) -> Report:
    seen, seed = sent.seen, sent.seed
    notes = repairing.put_host_back(machine)
    notes += repairing.clear_before_dump(seen.facts.tree, machine, force_program=request.force_program)
    run = runs.begin("migrate", seen.facts.tree.ids, tell=repairing.teller(machine, notes))
    work = MigrateWork(
        dump_request, machine, interruption, seen.facts, seen.findings, run, seed.image if seed is not None else None,
        notes=notes, image_id=seen.terms.transaction, there=seen.there, terms=seen.terms, wanted=request, seed=seed,
        files_sent=sent.files, look=look,
    )  # fmt: skip
    around = hooks.Hooked(
        "migrate", request.hooks, request.pid, str(dump_request.image), run, machine, interruption, as_interrupted
    )
    try:
        return around.carry_out(work.look_again, work.perform)
    except GpuckptError as error:
        error.findings = error.findings or work.findings
        work.settle_there(error)
        raise
    finally:
        run.finish(keep=work.tree_is_held)


def _judged(
    request: MigrateRequest,
    facts: DumpFacts,
    below: Sequence[Below],
    there: Destination,
    transaction: str,
    meanwhile: Callable[[], None],
) -> tuple[Terms, Judged]:
    """How the job shall come up there, and what that host says of it."""
    files = draft.carried(facts)
    terms = _terms(request, transaction)
    if request.carry_files != ("none",):
        terms = carrying.with_places(terms, facts.tree, files, below)
    digests = carrying.digests(facts.tree, files, meanwhile)
    return terms, there.judge(terms, draft.encode(facts, transaction), digests, meanwhile)


def _dump_request(request: MigrateRequest, transaction: str) -> DumpRequest:
    spool = Path(os.environ.get("GPUCKPT_TMPDIR") or SPOOL)
    return DumpRequest(
        **{one.name: getattr(request, one.name) for one in fields(TreeRequest)},
        image=request.keep_image or spool / f"{request.pid}-{transaction[:8]}",
        capture_files=request.carry_files,
        capture_code=False,
    )


def _make_spool(spool: Path, request: MigrateRequest) -> None:
    if request.keep_image is None and spool == SPOOL:
        with contextlib.suppress(OSError):  # the checks say what is wrong with it
            spool.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not request.dry_run:
            tidying.tidy(spool)


def _terms(request: MigrateRequest, transaction: str) -> Terms:
    name = f"{os.uname().nodename}-{request.pid}-{transaction[:8]}"
    return Terms(
        transaction=transaction,
        name=name,
        seed=f"{name}{SEED}" if request.pre_seed else "",
        files=f"{name}{FILES}" if request.carry_files != ("none",) else "",
        directory=request.reach.location.path,
        stdio={str(number): path for number, path in request.stdio.items()},
        gpu_map=request.gpu_map,
        allow=tuple(sorted(request.allow)),
        settle_seconds=request.settle_seconds,
        force_program=request.force_program,
        huge_pages=request.huge_pages,
        readiness=request.readiness,
        hooks=request.hooks_there,
    )


def _named(finding: Finding, where: str) -> Finding:
    """Which host a finding is about."""
    return replace(finding, found=f"on {where}: {finding.found}")

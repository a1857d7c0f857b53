"""dump: process tree -> image.

steps, and what kill -9 of this process at each leaves (2 to 5: flows/dumpwork.py; the owner's: owner/dumping.py):

1. gather, judge, plan      nothing was touched; --pre-dump runs last in it, --post-dump after all (flows/hooks.py)
2. IMAGE.partial            an unlocked partial: the next dump removes it
3. owner suspends, captures the owner sees the end of file, CRIU undoes its work, the tree goes on
4. publish (rename)         as 3; the image is complete and good all the same
5. commit                   the owner finishes the ending
With --leave-running 5 comes before 4: the tree goes on, the partial is removed by the next dump.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from gpuckpt import checks
from gpuckpt.flows import capturing, dumpfailures, gather, hooks
from gpuckpt.flows import repair as repairing
from gpuckpt.flows.dumpwork import DumpWork
from gpuckpt.flows.interruption import BrokenOff
from gpuckpt.flows.sealing import Sealing
from gpuckpt.model.errors import GpuckptError
from gpuckpt.model.report import Event, Finding, Report
from gpuckpt.owner import runs
from gpuckpt.owner.handle import spare_owner
from gpuckpt.system import procfs, signatures

if TYPE_CHECKING:
    from collections.abc import Callable

    from gpuckpt.checks.facts import DumpFacts
    from gpuckpt.flows.interruption import Interruption
    from gpuckpt.flows.machine import Machine
    from gpuckpt.model.requests import DumpRequest
    from gpuckpt.owner.handle import SpareOwner
    from gpuckpt.stores.directory import Image


NO_CUDA = "--huge-pages did nothing: no process of the tree uses CUDA"


def dump(
    request: DumpRequest,
    machine: Machine,
    interruption: Interruption,
    on_published: Callable[[], None] = lambda: None,
) -> Report:
    """Save the tree as an image. Raises GpuckptError with what became of the tree.

    `on_published` is called when the image is complete, before the tree ends; where it raises GpuckptError the tree
    goes on.
    """
    runs.refuse_busy(procfs.tree_ids(gather.identify(request.pid)))
    if request.sign_key is not None:
        signatures.require_usable(request.sign_key)
    sealing = Sealing.of(request.encrypt_to)
    with spare_owner(wanted=not request.dry_run) as spare:
        facts = gather.dump_facts(request, machine)
        findings = hooks.before_it(checks.judge(checks.DUMP_CHECKS, facts, request.allow), "dump", request.hooks)
        refusal = checks.refusal(findings)
        if refusal is None and not request.dry_run:
            return _carry_out(request, machine, interruption, facts, findings, sealing, on_published, spare)
    plan = {
        "image": str(request.image),
        "root_pid": request.pid,
        "pids": list(facts.tree.pids),
        **hooks.planned("dump", request.hooks),
        "files": checks.needs_at_restore(request, facts.tree),
    }
    return Report("dump", "refused" if refusal else "planned", "untouched", plan, findings, refusal)


def _carry_out(
    request: DumpRequest,
    machine: Machine,
    interruption: Interruption,
    facts: DumpFacts,
    findings: tuple[Finding, ...],
    sealing: Sealing | None,
    on_published: Callable[[], None],
    spare: SpareOwner | None,
) -> Report:
    """A dump whose checks have passed."""
    with contextlib.ExitStack() as stack:
        notes = repairing.put_host_back(machine)
        notes += repairing.clear_before_dump(facts.tree, machine, force_program=request.force_program)
        if request.huge_pages and not facts.tree.cuda:
            notes.append(NO_CUDA)
        base = _base(request, machine, interruption, notes)
        if base is not None:
            stack.callback(base.close)
        run = runs.begin("dump", facts.tree.ids, tell=repairing.teller(machine, notes))
        work = DumpWork(
            *(request, machine, interruption, facts, findings, run, base, sealing),
            notes=notes,
            on_published=on_published,
            spare=spare,
        )
        around = hooks.Hooked(
            *("dump", request.hooks, request.pid, str(request.image), run, machine, interruption),
            broken_off=dumpfailures.nothing_touched,
        )
        try:
            return around.carry_out(work.look_again, work.perform)
        except GpuckptError as error:
            error.findings = error.findings or work.findings
            raise
        finally:
            run.finish(keep=work.tree_is_held)


def _base(request: DumpRequest, machine: Machine, interruption: Interruption, notes: list[str]) -> Image | None:
    """The base image, verified while the tree still runs. Raises NotFound, Refused, Interrupted."""
    if request.base is None:
        return None
    machine.listener(Event("verify", "begin"))
    try:
        return capturing.open_base(request, interruption, notes)
    except BrokenOff as trouble:
        raise dumpfailures.nothing_touched(trouble) from None

"""push and pull as root in two processes: what reads the other side's words has given up root (system/apart.py).

The rights it keeps: push reads its image; pull reads and writes beneath its directory, and reads who may sign. What
takes more is started or done by the process that it has parted from: ssh, and the errands of flows/source.py.
"""

from __future__ import annotations

import contextlib
import os
import signal
from typing import TYPE_CHECKING

from gpuckpt.model.errors import TransferFailed
from gpuckpt.stores.farsums import is_command
from gpuckpt.stores.landing import make_parent
from gpuckpt.stores.ssh import COMMAND
from gpuckpt.system import commands, limits
from gpuckpt.system.apart import PASSED_ON, Confined, part
from gpuckpt.system.confinement import Keep
from gpuckpt.system.ssh import OwnSsh

if TYPE_CHECKING:
    from collections.abc import Callable

    from gpuckpt.model.requests import PullRequest, PushRequest, Reach
    from gpuckpt.system.apart import Errand

    Work = Callable[[], int]

_keeper: list[Confined] = []
"""Whom this process asks, once it is the confined one: a fact about the process, as its user is."""


def keeper() -> Confined | None:
    """Whom this process asks for what takes root; None where it has its rights itself."""
    return _keeper[0] if _keeper else None


def push(request: PushRequest, work: Work) -> int:
    """Carry out a push whose work ends with an exit status; returns it. Raises GpuckptError."""
    from gpuckpt.flows import source  # noqa: PLC0415  which asks the keeper

    return _apart(request.reach, Keep(reads=(request.image,)), source.errands(request), work)


def pull(request: PullRequest, work: Work) -> int:
    """Carry out a pull whose work ends with an exit status; returns it. Raises GpuckptError."""
    reads = () if request.allowed_signers is None else (request.allowed_signers,)
    if request.verify_only or os.geteuid() != 0:
        return _apart(request.reach, Keep(reads=reads), {}, work)
    made = make_parent(request.directory / "image")
    try:
        return _apart(request.reach, Keep((request.directory,), reads), {}, work)
    finally:
        # Nothing came: not even the directory stays.
        if made and keeper() is None:
            with contextlib.suppress(OSError):
                request.directory.rmdir()


def _apart(reach: Reach, keep: Keep, errands: dict[str, Errand], work: Work) -> int:
    limits.work_in_batches()
    if os.geteuid() != 0:
        return work()
    from gpuckpt.flows import far  # noqa: PLC0415  which asks the keeper

    serve = f"{reach.remote_command or COMMAND} serve"
    ended = part(OwnSsh(far.account_of(reach)), lambda command: command == serve or is_command(command), keep, errands)
    if isinstance(ended, Confined):
        _keeper.append(ended)
        return work()
    return ended if ended >= 0 else _as_it_ended(-ended)


def _as_it_ended(number: int) -> int:
    """The confined process was ended by a signal. A person's ends this one too."""
    if number in PASSED_ON:
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)
    words = commands.describe_status(-number)
    raise TransferFailed(f"the process that reads what the other side sends {words}", "the same command continues it")

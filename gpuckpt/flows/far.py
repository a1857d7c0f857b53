"""The other host: what is there is found out by asking it."""

from __future__ import annotations

import contextlib
import shlex
from typing import TYPE_CHECKING

from gpuckpt.flows import apart
from gpuckpt.model.errors import MachineLacks, TransferFailed
from gpuckpt.stores.protocol import IsSeries
from gpuckpt.stores.ssh import COMMAND, ONLY_SFTP, NoGpuckpt, SshStore
from gpuckpt.system.links import LinkLost, Pace
from gpuckpt.system.ssh import Account, Caller

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gpuckpt.model.location import Location
    from gpuckpt.model.requests import Reach
    from gpuckpt.stores.sftp import SftpStore

AGAIN = "the same command continues it"
SFTP_ALONE = "internal-sftp"
"""As a remote command: nothing else can be run there (sshd_config(5) calls it so), and nothing else is tried."""


def account_of(reach: Reach) -> Account:
    """Whom ssh calls."""
    return Account(reach.location.host, reach.location.port, reach.ssh_config, reach.may_ask)


def connect(reach: Reach, pace: Pace | None = None) -> SshStore | SftpStore:
    """A host with gpuckpt, or a bare SFTP host. Raises GpuckptError, LinkLost."""
    account = account_of(reach)
    caller = Caller(account, pace, reach.stall_seconds, apart.keeper())
    if reach.remote_command == SFTP_ALONE:
        return _bare(caller, ONLY_SFTP)
    try:
        return SshStore(caller, reach.remote_command or COMMAND)
    except NoGpuckpt as missing:
        if reach.remote_command:
            raise MachineLacks(
                f"gpuckpt does not answer on {account.host}: {missing}",
                f"make this work first: {caller.by_hand()} '{reach.remote_command} inspect'",
            ) from None
        return _bare(caller, str(missing))


def _bare(caller: Caller, why: str) -> SftpStore:
    call = caller.sftp()  # it connects meanwhile
    try:
        from gpuckpt.stores.sftp import SftpStore  # noqa: PLC0415  paramiko takes 0.1 to 0.2 s to load
    except BaseException:
        call.close()
        raise
    return SftpStore(caller, why, call)


def connect_or_fail(reach: Reach, pace: Pace | None = None) -> SshStore | SftpStore:
    """As `connect`; a link that breaks is a TransferFailed."""
    try:
        return connect(reach, pace)
    except LinkLost as lost:
        raise as_failure(reach, lost) from None


@contextlib.contextmanager
def naming_newest(verb: str, location: Location, *further: object) -> Iterator[None]:
    """Whoever names a series where an image is meant gets the command for its newest one, with `further` arguments."""
    try:
        yield
    except IsSeries as found:
        image = location.at(f"{location.path.rstrip('/')}/{found.newest}")
        command = shlex.join(["gpuckpt", verb, str(image), *map(str, further)])
        found.hint = f"name one of them; for the newest: {command}"
        raise


def as_failure(reach: Reach, lost: Exception) -> TransferFailed:
    """A broken line as a failure of the command."""
    if isinstance(lost, TransferFailed):
        return lost
    return TransferFailed(f"{reach.location.host}: {lost}", AGAIN)

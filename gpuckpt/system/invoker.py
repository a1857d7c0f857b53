"""Who typed the command: under sudo not root, and ssh's configuration, agent and known hosts are that user's.

ssh then runs as that user: a ProxyCommand or `Match exec` of a user's configuration must not run as root.
"""

from __future__ import annotations

import contextlib
import os
import pwd

from gpuckpt.model.records import dataclass
from gpuckpt.system import procfs

MOST_ANCESTORS = 32


@dataclass(frozen=True, slots=True)
class Invoker:
    """The user whose ssh is used."""

    uid: int
    gid: int
    groups: tuple[int, ...]
    environment: dict[str, str]
    """HOME, USER, LOGNAME and, where one is running, SSH_AUTH_SOCK."""


def behind_sudo() -> Invoker | None:
    """The user who called sudo (or doas), or None where this process is nobody else's."""
    number = os.environ.get("SUDO_UID", "")
    if os.geteuid() != 0 or not number.isascii() or not number.isdigit() or number == "0":
        return None
    try:
        entry = pwd.getpwuid(int(number))
    except (KeyError, OverflowError):
        return None
    groups = tuple(os.getgrouplist(entry.pw_name, entry.pw_gid))
    environment = {"HOME": entry.pw_dir, "USER": entry.pw_name, "LOGNAME": entry.pw_name}
    agent = _agent_of(entry.pw_uid)
    return Invoker(entry.pw_uid, entry.pw_gid, groups, {**environment, **({"SSH_AUTH_SOCK": agent} if agent else {})})


def _agent_of(uid: int) -> str:
    """Sudo drops SSH_AUTH_SOCK; the shell it was typed in still has it."""
    places = [os.environ.get("SSH_AUTH_SOCK", "")]
    for pid, _ in procfs.ancestors(os.getpid())[:MOST_ANCESTORS]:
        # In a container pid 1 may be shut off even from root.
        with contextlib.suppress(PermissionError):
            places.append(procfs.environment_values(pid, "SSH_AUTH_SOCK").get("SSH_AUTH_SOCK", ""))
    return next((place for place in places if place and _belongs_to(place, uid)), "")


def _belongs_to(path: str, uid: int) -> bool:
    try:
        return os.stat(path).st_uid == uid  # noqa: PTH116 - a path as text
    except OSError:
        return False

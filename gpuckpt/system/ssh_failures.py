"""Why ssh could not connect, out of what it says: the cause, and what a person does about it.

The texts are those of OpenSSH 8.0 to 10.x (sshconnect.c, sshconnect2.c, clientloop.c); a text that none of the
patterns knows is shown as it is.
"""

from __future__ import annotations

import re
import shlex
from typing import TYPE_CHECKING

from gpuckpt.model.errors import GpuckptError, MachineLacks, NotFound, Refused, TransferFailed

if TYPE_CHECKING:
    from gpuckpt.system.ssh import Caller

MOST_WORDS = 200
NOISE = re.compile(
    r"debug\d: |OpenSSH_|Authenticated to |Transferred: |Bytes per second: |Warning: Permanently|\s*$|@@@|"
    r"Connection to .* closed|client_global_hostkeys|Pseudo-terminal|Exit status "
)
"""Lines of `ssh -v` that say nothing about a failure."""

SERVER_KEY = re.compile(r"debug1: Server host (?:key|certificate): (\S+) (SHA256:\S+)")
OFFENDING = re.compile(r"Offending (?:\S+ )?key in (.+?):(\d+)", re.IGNORECASE)
REMOVAL = re.compile(r"^\s*(ssh-keygen -f .* -R .*?)\s*$", re.MULTILINE)
NOT_REACHED = re.compile(
    r"Connection (?:refused|timed out|closed|reset)|No route to host|Network is unreachable|Operation timed out|"
    r"kex_exchange_identification|banner exchange|Broken pipe|not responding"
)


class NotReached(TransferFailed):
    """The host does not answer: now; in a minute it may."""


def explain(caller: Caller, text: str) -> GpuckptError:
    """The failure behind a status of 255."""
    host = caller.account.host
    if "Host key verification failed" in text or "No matching host key" in text:
        return _host_key(caller, text)
    if "Permission denied (" in text or "Too many authentication failures" in text:
        way = f"make this work first: {caller.by_hand()} true"
        asked = "" if caller.account.may_ask else " (without a terminal nothing can be asked: use an agent, or a key)"
        return MachineLacks(f"{host} lets nobody in with what ssh offers: {last_words(text)}", way + asked)
    if "Could not resolve hostname" in text:
        return NotFound(f"{last_words(text)}", "name a host that ssh knows")
    if NOT_REACHED.search(text):
        return NotReached(f"{host} cannot be reached: {last_words(text)}", "the same command tries again")
    return MachineLacks(f"ssh to {host} failed: {last_words(text)}", f"make this work first: {caller.by_hand()} true")


def _host_key(caller: Caller, text: str) -> GpuckptError:
    kind, fingerprint = (SERVER_KEY.findall(text) or [("", "not shown by ssh")])[-1]
    shown = f"{fingerprint} ({kind})" if kind else fingerprint
    host = caller.account.host
    if re.search(r"revoked", text, re.IGNORECASE):
        why = f"the host key of {host} is marked as revoked in known_hosts: {shown}"
        return Refused(why, "do not connect; ask who runs that host for its new key")
    if "IDENTIFICATION HAS CHANGED" in text or OFFENDING.search(text):
        return Refused(f"the host key of {host} has changed: it is now {shown}", _removal(text, host))
    accept = (
        f"compare it with the host's own (ssh-keygen -lf /etc/ssh/ssh_host_*_key.pub there), then: {_asking(caller)}"
    )
    return Refused(f"the host key of {host} is not known: {shown}", accept)


def _asking(caller: Caller) -> str:
    """A plain ssh, which shows the key and asks before it writes it down."""
    return caller.by_hand().replace("ssh ", "ssh -o StrictHostKeyChecking=ask ", 1)


def _removal(text: str, host: str) -> str:
    known = REMOVAL.search(text)
    place = OFFENDING.search(text)
    name = host.rpartition("@")[2]
    by_name = ["ssh-keygen", *(["-f", place[1]] if place else []), "-R", name]
    command = " ".join(known[1].split()) if known else shlex.join(by_name)
    where = f" (line {place[2]} of {place[1]})" if place else ""
    return f"somebody may be in between; if the host was set up anew, remove the old key{where}: {command}"


def last_words(text: str) -> str:
    """The last line that says something."""
    lines = [line.strip() for line in text.splitlines() if not NOISE.match(line)]
    return (lines[-1] if lines else "ssh said nothing")[:MOST_WORDS]

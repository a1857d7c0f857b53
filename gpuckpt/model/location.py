"""Where something lies on another host: user@host:path, as scp writes it, or ssh://user@host:port/path."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import NoReturn

from gpuckpt.model.errors import UsageError
from gpuckpt.model.records import dataclass

_SCP = re.compile(r"(?P<host>(?:[^@/:\[\]]+@)?(?:\[[^\]]*\]|[^@/:\[\]]+)):(?P<path>.*)", re.DOTALL)
_URL = re.compile(
    r"ssh://(?P<host>(?:[^@/:\[\]]+@)?(?:\[[^\]]*\]|[^@/:\[\]]+))(?::(?P<port>[0-9]{1,5}))?(?P<path>/.*)?"
)
_HOST = re.compile(r"[^\s\x00-\x20\x7f;|&<>'\"`$()\\]+")
"""OpenSSH refuses shell metacharacters in names too: ProxyCommand hands them to a shell."""


@dataclass(frozen=True, slots=True)
class Location:
    """A path on a host; an empty path is the directory one arrives in."""

    host: str
    """As ssh takes it: HOST or USER@HOST, an IPv6 address without its brackets."""
    path: str = ""
    port: int | None = None

    def at(self, path: str) -> Location:
        """Another path of the same host."""
        return replace(self, path=path)

    def __str__(self) -> str:
        user, at, name = self.host.rpartition("@")
        shown = f"{user}{at}[{name}]" if ":" in name else self.host
        return f"ssh://{shown}:{self.port}{self.path}" if self.port else f"{shown}:{self.path}"


def parse(text: str) -> Location | None:
    """The location a text names, or None for a path of this host: one with a slash before its first colon.

    Raises UsageError for a host that no ssh can be asked for.
    """
    url = text.startswith("ssh://")
    match = (_URL if url else _SCP).fullmatch(text)
    if match is None:
        if url:
            _refuse(text)
        return None
    host = match["host"].replace("[", "").replace("]", "")
    user, _, name = host.rpartition("@")
    if not name or not _HOST.fullmatch(host) or name.startswith("-") or user.startswith("-") or "\0" in match["path"]:
        _refuse(text)
    port = int(match["port"]) if url and match["port"] else None
    if port is not None and not 0 < port < 1 << 16:
        _refuse(text)
    return Location(host, match["path"] or "", port)


def _refuse(text: str) -> NoReturn:
    raise UsageError(f"{text[:200]}: no host and path", "write user@host:/path, or ssh://user@host:port/path")

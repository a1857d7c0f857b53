"""Where configuration lies, and reading one file of it with suspicion: what it says may run as root (hooks)."""

from __future__ import annotations

import os
import pwd
import stat
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gpuckpt.model.errors import UsageError, in_words
from gpuckpt.model.records import dataclass

SYSTEM = Path("/etc/gpuckpt/config.toml")
BELOW_HOME = Path("gpuckpt/config.toml")
MOST_BYTES = 1 << 20
"""More than anybody writes by hand."""
NOTHING = "/dev/null"
"""`--config /dev/null`: no file at all."""


@dataclass(frozen=True, slots=True)
class ConfigFile:
    """One place of configuration: what was read there, or None where nothing is."""

    path: Path
    content: dict[str, Any] | None


def read_files(explicit: str | None, environment: Mapping[str, str] = os.environ) -> tuple[ConfigFile, ...]:
    """The files in force, the weaker first. An explicit one stands for all. Raises UsageError."""
    if explicit is not None:
        return (_explicit(explicit),)
    return tuple(ConfigFile(path, _read(path)) for path in (SYSTEM, user_file(environment)))


def user_file(environment: Mapping[str, str]) -> Path:
    """The user's own file. Under sudo (or doas) root's: with the invoking user's, whoever can change that is root."""
    borrowed = os.geteuid() == 0 and any(name in environment for name in ("SUDO_UID", "DOAS_USER"))
    above = "" if borrowed else environment.get("XDG_CONFIG_HOME", "")
    if above.startswith("/"):
        return Path(above) / BELOW_HOME
    home = "" if borrowed else environment.get("HOME", "")
    return Path(home if home.startswith("/") else _home_of_uid()) / ".config" / BELOW_HOME


def _home_of_uid() -> str:
    try:
        return pwd.getpwuid(os.geteuid()).pw_dir
    except KeyError:
        return "/nonexistent"  # a container's nameless user


def _explicit(name: str) -> ConfigFile:
    if not name:
        raise UsageError("--config: no file is named", f"name one; {NOTHING} stands for none")
    path = Path(name).absolute()
    content: dict[str, Any] | None = {} if os.path.realpath(path) == NOTHING else _read(path, explicit=True)
    if content is None:
        raise UsageError(f"{path}: there is no such file", "--config (or GPUCKPT_CONFIG) must name a file that exists")
    return ConfigFile(path, content)


def _read(path: Path, *, explicit: bool = False) -> dict[str, Any] | None:
    """A file's tables; None where there is no file."""
    try:
        raw = _bytes_of(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        if not explicit and isinstance(error, PermissionError) and not os.access(path.parent, os.X_OK):
            return None  # what may not even be looked for is not this user's: HOME of root in a shell of another
        raise UsageError(f"{path}: {in_words(error).removeprefix(f'{path}: ')}", "it must be readable") from None
    return _parse(path, raw)


def _bytes_of(path: Path) -> bytes:
    # Without waiting for a writer of a FIFO. Links are followed: dotfiles are often kept elsewhere.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        seen = os.fstat(descriptor)
        if not stat.S_ISREG(seen.st_mode):
            raise UsageError(f"{path} is no regular file", f"name a TOML file; {NOTHING} stands for none")
        _require_own(path, seen)
        if seen.st_size > MOST_BYTES:
            raise UsageError(f"{path} has {seen.st_size} bytes; no configuration is so long", "name a TOML file")
        return os.read(descriptor, MOST_BYTES)
    finally:
        os.close(descriptor)


def _require_own(path: Path, seen: os.stat_result) -> None:
    """Whoever can change what root reads here can run programs as root."""
    if os.geteuid() != 0:
        return
    from gpuckpt.system.files import unsafe_places  # noqa: PLC0415  only where a file is

    found = list(unsafe_places(path, 0))
    # Judged by name above, and by what is open: between the two it can have been exchanged.
    if seen.st_uid != 0 or seen.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        found = found or [f"{path} is not root's alone"]
    if found:
        why = f"{path}: others could change it, and what it says is done as root: {'; '.join(found)}"
        raise UsageError(why, "chown root:root and chmod go-w, or keep it elsewhere")


def _parse(path: Path, raw: bytes) -> dict[str, Any]:
    # Not earlier: --help and TAB read no configuration.
    if sys.version_info >= (3, 11):
        import tomllib  # noqa: PLC0415
    else:
        import tomli as tomllib  # noqa: PLC0415
    try:
        content: dict[str, Any] = tomllib.loads(raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        raise UsageError(f"{path}, line {line}: it is no UTF-8", "save it as UTF-8") from None
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path}: it is no TOML: {error}", "correct it, or leave it out with --config") from None
    return content

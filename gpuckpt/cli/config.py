"""Configuration: what files may say, which of it holds for a run, and where each value comes from.

Weaker to stronger: the options' own defaults, /etc/gpuckpt/config.toml, the user's file, and in both a table of a
host over the table of a command; then the command line. Pure: the files were read by configfile.py, and what options
there are is handed in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import field
from pathlib import Path
from typing import Any

from gpuckpt.cli.configfile import ConfigFile
from gpuckpt.model.errors import UsageError
from gpuckpt.model.location import Location
from gpuckpt.model.records import dataclass

HOST = "host"
HOST_OPTIONS = ("remote-command", "ssh-config", "connections", "bwlimit")
"""How another host is reached: what a table of a host may say, and what no run on this host alone needs."""
OF_ONE_RUN = (
    *("config", "show-config", "json", "dry-run"),
    *("tree", "pid-file", "unit", "into", "name", "push", "no-base"),
    *("base", "verify", "verify-only", "extract", "delete-source", "keep-image"),
    *("allow", "overwrite-files", "truncate-files", "gpu", "stdin", "stdout", "stderr"),
)
"""What no file may say: which job, what a run shall do, and permissions, which each run must be given anew."""
OF_A_SERIES = ("keep", "keep-within", "min-free", "full-every")
"""What only `dump --into` takes of [dump]."""
OF_A_REPAIR = ("timeout", "quiet", "verbose")
"""What `restore --tree` takes of [restore]."""

LONGEST = 300
"""Characters of a key or value that a message repeats."""

Value = str | bool | list[str]


@dataclass(frozen=True, slots=True)
class Option:
    """An option of a command, as far as a file is judged by it."""

    flag: bool = False
    multiple: bool = False
    number: bool = False
    """A bare TOML number will do as well."""
    path: bool = False
    check: Callable[[Any], object] = lambda _: None
    """Raises ValueError for what the option itself would refuse."""


Options = Mapping[str, Mapping[str, Option]]
"""By command and by long name, without the dashes."""


@dataclass(frozen=True, slots=True)
class Setting:
    """A value that a file gives."""

    value: Value
    path: Path


Table = dict[str, Setting]


@dataclass(frozen=True, slots=True)
class Configuration:
    """All that the files in force say."""

    files: tuple[ConfigFile, ...] = ()
    commands: dict[str, Table] = field(default_factory=dict)
    hosts: dict[str, Table] = field(default_factory=dict)

    def for_run(
        self, command: str, known: Iterable[str], where: Location | None, *, repairs: bool = False, series: bool = False
    ) -> Table:
        """What holds for one run of a command that has the `known` options.

        What makes no sense beside what was typed is left out: it was not meant for this run.
        """
        own = self.commands.get(command, {})
        if where is None:
            own = {name: setting for name, setting in own.items() if name not in HOST_OPTIONS}
        if not series:
            own = {name: setting for name, setting in own.items() if name not in OF_A_SERIES}
        if repairs:
            own = {name: setting for name, setting in own.items() if name in OF_A_REPAIR}
        theirs = {} if where is None else self.for_host(where)
        known = set(known)
        return {**own, **{name: setting for name, setting in theirs.items() if name in known}}

    def for_host(self, where: Location) -> Table:
        """The tables of a host as it was typed, USER@HOST over HOST."""
        name = where.host.rpartition("@")[2]
        return {**self.hosts.get(name, {}), **self.hosts.get(where.host, {})}


def configuration(files: tuple[ConfigFile, ...], options: Options) -> Configuration:
    """Judge every file, whole, and put the stronger over the weaker. Raises UsageError with file and key."""
    found = Configuration(files)
    for file in files:
        for name, content in (file.content or {}).items():
            table = _table(file, name, content)
            if name == HOST:
                _add_hosts(found, file, table, options)
            elif name in options:
                settings = _settings(file, f"[{name}]", table, options[name], others(name, options))
                found.commands.setdefault(name, {}).update(settings)
            else:
                raise _refusal(file, f"[{name}]", "there is no such command", near(name, (*options, HOST)))
    return found


def near(name: str, known: Iterable[str]) -> str:
    """'did you mean X?', or what there is."""
    import difflib  # noqa: PLC0415  only a mistake needs it

    names = sorted(known)
    close = difflib.get_close_matches(name.replace("_", "-"), names, n=1)
    return f"did you mean {close[0]}?" if close else f"there are {', '.join(names)}"


def others(command: str, options: Options) -> dict[str, str]:
    """Options that only other commands have -> the first of these."""
    found: dict[str, str] = {}
    for other, known in options.items():
        for name in known:
            if name not in options[command]:
                found.setdefault(name, other)
    return found


def _add_hosts(found: Configuration, file: ConfigFile, tables: dict[str, Any], options: Options) -> None:
    known = {name: table[name] for table in options.values() for name in HOST_OPTIONS if name in table}
    elsewhere = {name: command for command, table in options.items() for name in table if name not in known}
    for host, content in tables.items():
        where = f'[{HOST}."{host}"]'
        table = _table(file, where, content)
        # A dot outside of quotes makes tables within tables: [host.gpu7.example].
        if any(isinstance(value, dict) for value in table.values()):
            raise _refusal(file, where, "it holds another table", f'write the name in quotes: [{HOST}."gpu7.example"]')
        found.hosts.setdefault(host, {}).update(_settings(file, where, table, known, elsewhere))


def _table(file: ConfigFile, name: str, content: Any) -> dict[str, Any]:
    if isinstance(content, dict):
        return content
    raise _refusal(
        file, name, "it is no table", 'options stand below a command, [dump], or a host, [host."gpu7.example"]'
    )


def _settings(
    file: ConfigFile, where: str, table: dict[str, Any], known: Mapping[str, Option], elsewhere: Mapping[str, str]
) -> Table:
    found = {}
    for name, value in table.items():
        key = f"{where} {name}"
        if name in OF_ONE_RUN:
            raise _refusal(
                file, key, "it belongs to one run", "leave it out of the file, and give it on the command line"
            )
        option = known.get(name)
        if option is None:
            hint = f"it belongs to [{elsewhere[name]}]" if name in elsewhere else near(name, _for_files(known))
            raise _refusal(file, key, "there is no such option", hint)
        found[name] = Setting(_judged(file, key, value, option), file.path)
    return found


def _for_files(known: Iterable[str]) -> list[str]:
    return [name for name in known if name not in OF_ONE_RUN]


def _judged(file: ConfigFile, key: str, value: Any, option: Option) -> Value:
    """The value as the option takes it, after the option itself has looked at it."""
    taken = _typed(file, key, value, option)
    texts = [taken] if isinstance(taken, str) else taken if isinstance(taken, list) else []
    for text in texts:
        if "\0" in text:
            raise _refusal(file, key, "it holds a NUL character", "no option can")
        if option.path and not text.startswith("/"):
            raise _refusal(
                file, key, f"{text!r} is no absolute path", "begin it with /: gpuckpt is started in any directory"
            )
    try:
        option.check(taken)
    except ValueError as error:
        raise _refusal(file, key, str(error), "give what the option takes") from None
    return taken


def _typed(file: ConfigFile, key: str, value: Any, option: Option) -> Value:
    if option.flag:
        if isinstance(value, bool):
            return value
        raise _refusal(file, key, f"{value!r} is neither true nor false", "write true or false, without quotes")
    if option.multiple and isinstance(value, list) and all(isinstance(one, str) for one in value):
        return value
    if isinstance(value, str):
        return [value] if option.multiple else value
    if option.number and isinstance(value, (int, float)) and not isinstance(value, bool):
        return str(value)
    kinds = "a string in quotes" + (", or a list of them" if option.multiple else " or a number" * option.number)
    raise _refusal(file, key, f"{str(value)[:80]} is of the wrong type", f"write {kinds}")


def _refusal(file: ConfigFile, key: str, why: str, hint: str) -> UsageError:
    return UsageError(f"{file.path}: {key[:LONGEST]}: {why[:LONGEST]}", hint)

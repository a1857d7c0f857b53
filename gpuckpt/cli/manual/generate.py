"""Man pages and completion scripts as texts, the same for the same source: no clock, no locale."""

from __future__ import annotations

import functools
import re
import textwrap
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import typer.main
from typer.completion import get_completion_script  # type: ignore[attr-defined]  # it is the documented place

import gpuckpt
from gpuckpt.cli.app import program
from gpuckpt.cli.checklist import known_checks, known_ids
from gpuckpt.cli.config import HOST_OPTIONS, OF_ONE_RUN
from gpuckpt.model import errors
from gpuckpt.model.report import PHASES

DATE = "2026-11-30"
HERE = Path(__file__).parent
SECTIONS = (
    "NAME",
    "SYNOPSIS",
    "DESCRIPTION",
    "OPTIONS",
    "CONFIGURATION",
    "HOOKS",
    "JSON",
    "CHECKS",
    "EXIT STATUS",
    "ENVIRONMENT",
    "FILES",
    "EXAMPLES",
    "SEE ALSO",
)
ALWAYS = (errors.GpuckptError, errors.UsageError, errors.MachineLacks, errors.NotFound, errors.Interrupted)
TRANSFER = (
    *ALWAYS,
    errors.Refused,
    errors.Busy,
    errors.TransferFailed,
    errors.ImageCorrupt,
    errors.ImageTooNew,
)
ENDINGS: dict[str, tuple[type[errors.GpuckptError], ...]] = {
    "dump": (*ALWAYS, errors.Refused, errors.Busy, errors.DumpFailed, errors.TreeHeld, errors.TransferFailed),
    "inspect": (*ALWAYS, errors.Refused, errors.TransferFailed, errors.ImageCorrupt, errors.ImageTooNew),
    "restore": (
        *ALWAYS,
        errors.Refused,
        errors.Busy,
        errors.TreeHeld,
        errors.RestoreFailed,
        errors.RestoredUnhealthy,
        errors.ImageCorrupt,
        errors.ImageTooNew,
    ),
    "push": TRANSFER,
    "pull": TRANSFER,
    "migrate": (
        *ALWAYS,
        errors.Refused,
        errors.Busy,
        errors.DumpFailed,
        errors.TreeHeld,
        errors.RestoredUnhealthy,
        errors.TransferFailed,
        errors.GoUnanswered,
    ),
}
"""Which failures each command can end with."""
FORMS = {
    "dump": (
        r'"\-\-tree " PID " [" options "] " IMAGE',
        r'"\-\-tree " PID " [" options "] \-\-into " DIR',
    ),
}
"""Usage lines of commands whose options exclude each other, as arguments of .RI: roman and italics in turn."""
LISTS = {"dump": "DUMP_CHECKS", "restore": "RESTORE_CHECKS"}


def files() -> dict[str, str]:
    """Every generated file: its path in the repository and its text."""
    pages = {f"man/{page_name(command)}.1": page(command) for command in ("", *ENDINGS)}
    return {**pages, **completions()}


def page_name(command: str) -> str:
    """The name of a command's page; that of the program without one."""
    return f"gpuckpt-{command}" if command else "gpuckpt"


def page(command: str) -> str:
    """One man page: the written sections, and the generated ones where nothing is written."""
    written = _written(page_name(command))
    generated = {
        "SYNOPSIS": _synopsis(command),
        "OPTIONS": _options(command),
        "CONFIGURATION": [] if command else _not_in_files(),
        "HOOKS": _lifted(command),
        "JSON": [] if command else _json_words(),
        "CHECKS": _checks(command),
        "EXIT STATUS": _exit_statuses(command),
        "SEE ALSO": _see_also(command),
    }
    lines = [f'.TH {page_name(command).upper()} 1 {DATE} "gpuckpt {gpuckpt.__version__}"']
    for section in SECTIONS:
        body = [*written.get(section, []), *generated.get(section, [])]
        if body:
            lines += [f'.SH "{section}"' if " " in section else f".SH {section}", *body]
    return "\n".join(_wrapped(lines)) + "\n"


def _wrapped(lines: Iterable[str]) -> Iterator[str]:
    """Text lines broken at 78 characters, as mandoc likes its input; macros and examples as they are."""
    as_it_is = False
    for line in lines:
        as_it_is = {".nf": True, ".fi": False}.get(line, as_it_is)
        if as_it_is or line.startswith("."):
            yield line
            continue
        broken = textwrap.wrap(line, 78, break_on_hyphens=False, break_long_words=False)
        # A word that comes to stand first must not become a macro.
        yield from (f"\\&{part}" if part.startswith((".", "'")) else part for part in broken)


def _written(name: str) -> dict[str, list[str]]:
    """The sections of a written text; comments that explain the source to its editors are left out."""
    sections: dict[str, list[str]] = {}
    current: list[str] = []
    for line in (HERE / f"{name}.man").read_text(encoding="utf-8").splitlines():
        if line.startswith(".SH "):
            current = sections.setdefault(line[4:].strip('"'), [])
        elif not line.startswith('.\\"'):
            current.append(line)
    return sections


@cache
def parser(command: str) -> Any:
    """Typer's command: the program itself or one of its verbs."""
    return _whole().commands[command] if command else _whole()


@functools.cache
def _whole() -> Any:
    return typer.main.get_command(program())


def _visible(command: str, kind: str) -> list[Any]:
    found = (item for item in parser(command).params if item.param_type_name == kind)
    return [item for item in found if not getattr(item, "hidden", False)]


def _synopsis(command: str) -> list[str]:
    verbs = [command] if command else [*ENDINGS]
    forms = [(verb, words) for verb in verbs for words in FORMS.get(verb) or (_words_of(verb),)]
    lines = "\n.br\n".join(f".B gpuckpt {verb}\n.RI {words}" for verb, words in forms).splitlines()
    return lines if command else [*lines, ".br", ".B gpuckpt \\-\\-version"]


def _words_of(command: str) -> str:
    """The rest of the usage line, as arguments of .RI: italics and roman in turn."""
    required = [item for item in _visible(command, "option") if item.required]
    arguments = _visible(command, "argument")
    texts = [f'"" "{roff(item.opts[0])} " {item.metavar}' for item in required]
    texts += ['"" "[" options "]"']
    texts += [f'"" "" {item.metavar}' if item.required else f'"" "[" {item.metavar} "]"' for item in arguments]
    return ' "" " " '.join(texts)


def _options(command: str) -> list[str]:
    lines: list[str] = []
    for item in [*_visible(command, "argument"), *_visible(command, "option")]:
        lines += [".TP", _term(item), roff(_text_of(item))]
    return [*lines, ".TP", ".BR \\-h , \\ \\-\\-help", "Show a short help and exit."]


def _text_of(item: Any) -> str:
    shown = isinstance(item.default, (str, float)) and not item.required
    default = f"{item.default:g}" if isinstance(item.default, float) else item.default
    return f"{item.help} The default is {default}." if shown else str(item.help)


def _term(item: Any) -> str:
    if item.param_type_name == "argument":
        return f".I {item.metavar}"
    names = " , \\ ".join(roff(name) for name in sorted(item.opts, key=len))
    value = f' "\\fR {_value(item.metavar)}"' if item.metavar else ""
    return f".BR {names}{value}"


def _value(metavar: str) -> str:
    return f"\\fI{metavar}\\fR" if metavar.isupper() else metavar


def _not_in_files() -> list[str]:
    """What no file may set, and what a host's table may: lists of the source."""
    of_one_run = ", ".join(sorted(f"`--{name}`" for name in OF_ONE_RUN))
    of_hosts = ", ".join(f"`{name}`" for name in HOST_OPTIONS)
    return [
        *(".TP", ".I Hosts", f"A table of a host takes {roff(of_hosts)}."),
        *(".TP", ".I Not in files", f"These belong to one run, and no file may say them: {roff(of_one_run)}."),
    ]


def _lifted(command: str) -> list[str]:
    """The checks that a command of the user may still change."""
    if command not in LISTS:
        return []
    lifted = known_ids("HOOK_MAY_LIFT")
    names = ", ".join(f"`{check.id}`" for check in known_checks(LISTS[command]) if check.id in lifted)
    return [".PP", roff(f"Judged again after `--pre-{command}`, and refusing only then, are {names}.")]


def _json_words() -> list[str]:
    """The words that stand in the source: codes of errors, phases of events."""
    kinds = dict.fromkeys(kind for kinds in ENDINGS.values() for kind in kinds)
    codes = ", ".join(f"`{kind.code}`" for kind in sorted(kinds, key=lambda kind: kind.status))
    phases = ", ".join(f"`{phase}`" for phase in ("verify", *PHASES))
    return [
        *(".TP", ".I error.code", f"{roff(codes)}, one for each exit status from 1 on."),
        *(".TP", ".I events"),
        roff(
            'Each line on stderr is {"event": PHASE, "state": "begin|progress|end|note|output"} with, where they are '
            'known, "message", "done_bytes", "total_bytes" and "seconds"; in a migration "job_is_on" names the host '
            "that owns the job from then on, or is `unknown`."
        ),
        f"The phases are {roff(phases)}.",
    ]


def _checks(command: str) -> list[str]:
    lines: list[str] = []
    for check in known_checks(LISTS[command]) if command in LISTS else ():
        traits = ",\\ ".join(_traits(check))
        lines += [".TP", f".BR {roff(check.id)} \\ ({traits})", roff(_sentence(check.summary))]
    return lines


def _traits(check: Any) -> Iterator[str]:
    yield {"block": "refuses", "warn": "warns", "note": "note"}[check.severity]
    if check.severity == "block" and getattr(check, "status", 20) != 20:
        yield f"status\\ {check.status}"
    if getattr(check, "irreversible", False):
        yield "refuses\\ when\\ unknown"
    if not getattr(check, "allowable", True):
        yield "no\\ \\-\\-allow"


def _sentence(text: str) -> str:
    first = text[:1] if text.startswith("gpuckpt") else text[:1].upper()
    return f"{first}{text[1:].rstrip('.')}."


def _exit_statuses(command: str) -> list[str]:
    classes = (
        ENDINGS[command] if command else tuple(dict.fromkeys(kind for kinds in ENDINGS.values() for kind in kinds))
    )
    lines = [".TP", ".B 0", "Done."]
    for kind in sorted(classes, key=lambda kind: kind.status):
        status, meaning = str(kind.status), kind.meaning
        if kind is errors.Interrupted:
            status, meaning = "128+\\fIn\\fB", "ended by signal n, after everything was undone"
        lines += [".TP", f".B {status}", roff(_sentence(meaning))]
    return lines


def _see_also(command: str) -> list[str]:
    others = [page_name(other) for other in ("", *ENDINGS) if other != command]
    references = [f".BR {roff(name)} (1)," for name in others]
    return [*references, ".BR criu (8)"]


def roff(text: str) -> str:
    """Plain text as man source: `code` becomes bold, --options get real dashes."""
    text = text.replace("\\", "\\e").replace("-", "\\-")
    text = re.sub(r"`([^`]*)`", r"\\fB\1\\fR", text)
    return f"\\&{text}" if text.startswith((".", "'")) else text


def completions() -> dict[str, str]:
    """Scripts that only call the program, so they do not age with its options: Typer's own, and ours for bash."""
    names = {"zsh": "_gpuckpt", "fish": "gpuckpt.fish"}
    typers = {
        f"completions/{name}": get_completion_script(prog_name="gpuckpt", complete_var="_GPUCKPT_COMPLETE", shell=shell)
        + "\n"
        for shell, name in names.items()
    }
    # Typer's takes user@host: apart, as bash does, and puts a blank behind a directory.
    return {"completions/gpuckpt.bash": (HERE / "gpuckpt.bash").read_text(encoding="utf-8"), **typers}

"""The command line: the program, its verbs, and the one place where a run ends.

Each verb stands in a file of its own with its options and one call; what it does lives in flows/, which
returns a report. `main` has the only `except` and the only exit.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import Annotated, NoReturn

import typer
from typer.completion import completion_init  # type: ignore[attr-defined]  # it is the documented place

import gpuckpt
from gpuckpt.cli.failing import fail, interrupt_on_signals
from gpuckpt.cli.verb import Verb
from gpuckpt.cli.verbs import VERBS
from gpuckpt.model.errors import UsageError

LISTING: tuple[list[str], ...] = ([], ["--help"], ["-h"], ["--version"])
"""What is answered without any verb's options."""


def program(verbs: tuple[str, ...] = tuple(VERBS), *, listed: bool = False) -> typer.Typer:
    """The program with these verbs; each costs a few milliseconds. `listed`: with their names alone, to be shown."""
    # Plain help: it needs no rich (64 ms at each start) and looks the same in every locale and in a pipe.
    made = typer.Typer(
        name="gpuckpt",
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    )
    made.callback(invoke_without_command=True)(_without_a_verb)
    for name in verbs:
        verb = _nothing if listed else getattr(importlib.import_module(f"gpuckpt.cli.{name}"), name)
        made.command(name, cls=Verb, **VERBS[name])(verb)
    return made


def _nothing() -> None: ...


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"gpuckpt {gpuckpt.__version__}")
        raise typer.Exit


def _without_a_verb(
    context: typer.Context,
    *,
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_show_version, help="Show the version and exit.")
    ] = False,
) -> None:
    """Save a running process tree with its GPU state, and bring it back.

    Every command takes --json for programs. `man gpuckpt` explains the exit statuses and the checks.
    """
    if context.invoked_subcommand is None and not version:
        typer.echo(context.get_help(), err=True)
        raise typer.Exit(UsageError.status)


def _complete_plainly() -> None:
    """At TAB Typer loads rich, where it is installed, to take the markup out of help that has none: 0.1 s."""
    if "_GPUCKPT_COMPLETE" in os.environ:
        sys.modules["rich"] = None  # type: ignore[assignment]  # how Python says "not installed"


def _for_this_run() -> typer.Typer:
    """The program with no verb but the one that is named, if one is."""
    at_tab = "_GPUCKPT_COMPLETE" in os.environ
    line = os.environ.get("COMP_WORDS") or os.environ.get("_TYPER_COMPLETE_ARGS") or ""
    words = line.split() if at_tab else sys.argv
    named = tuple(word for word in words[1:2] if word in VERBS)
    return program(named) if named else program(listed=at_tab or words[1:] in LISTING)


def main() -> NoReturn:
    """Run the command line of this process and exit."""
    try:
        _complete_plainly()
        # Typer leaves this to add_completion; without it TAB is answered with "Shell bash not supported".
        completion_init()
        interrupt_on_signals()
        status = _for_this_run()(prog_name="gpuckpt", standalone_mode=False) or 0
    except BaseException as error:  # noqa: BLE001  the one place where every failure gets its words and its status
        status = fail(error, sys.argv[1:])
    sys.exit(status)


if __name__ == "__main__":
    main()

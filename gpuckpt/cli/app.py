"""The command line: the program, its verbs, and the one place where a run ends.

Each verb stands in a file of its own with its options and one call; what it does lives in flows/, which
returns a report. `main` has the only `except` and the only exit.
"""

from __future__ import annotations

import copy
import os
import sys
from typing import Annotated, NoReturn

import typer
from typer.completion import completion_init  # type: ignore[attr-defined]  # it is the documented place

import gpuckpt
from gpuckpt.cli.dump import dump
from gpuckpt.cli.failing import fail, interrupt_on_signals
from gpuckpt.cli.inspect import inspect
from gpuckpt.cli.migrate import migrate
from gpuckpt.cli.pull import pull
from gpuckpt.cli.push import push
from gpuckpt.cli.restore import restore
from gpuckpt.cli.serve import serve
from gpuckpt.cli.verb import Verb
from gpuckpt.model.errors import UsageError

# Plain help: it needs no rich (64 ms at each start) and looks the same in every locale and in a pipe.
app = typer.Typer(
    name="gpuckpt",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)


app.command(cls=Verb, short_help="Save a process tree as an image.", options_metavar="--tree PID [OPTIONS]")(dump)
app.command(cls=Verb, short_help="Say what an image, a running tree or this host is.")(inspect)
app.command(cls=Verb, short_help="Bring the tree of an image back, or repair one.")(restore)
app.command(cls=Verb, short_help="Copy an image to another host.")(push)
app.command(cls=Verb, short_help="Copy an image from another host.")(pull)
app.command(cls=Verb, short_help="Move a process tree to another host.", options_metavar="--tree PID [OPTIONS]")(
    migrate
)
app.command(cls=Verb, hidden=True)(serve)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"gpuckpt {gpuckpt.__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def program(
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
    """At TAB the program with no verb but the one that is named, if one is: Typer builds all it has, 3 ms each."""
    at_tab = "_GPUCKPT_COMPLETE" in os.environ
    line = os.environ.get("COMP_WORDS") or os.environ.get("_TYPER_COMPLETE_ARGS") or ""
    words = line.split() if at_tab else []
    named = [verb for verb in app.registered_commands if verb.callback and verb.callback.__name__ in words[1:2]]
    if not named:
        return app
    program_with_one = copy.copy(app)
    program_with_one.registered_commands = named
    return program_with_one


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

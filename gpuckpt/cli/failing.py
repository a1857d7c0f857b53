"""What a person and a program get to see when a run ends by an exception."""

from __future__ import annotations

import shlex
import signal
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any

import typer

from gpuckpt.cli.manner import Manner
from gpuckpt.cli.verbs import VISIBLE
from gpuckpt.model.errors import GpuckptError, Interrupted, UsageError

if TYPE_CHECKING:
    from gpuckpt.model.report import Outcome

Handler = Callable[[int, FrameType | None], None] | signal.Handlers

OF_ALL_VERBS = ("--json", "--quiet", "-q", "--verbose", "-v", "--config")
OF_A_TREE = {"dump": "IMAGE", "migrate": "USER@HOST"}
"""What takes a process by option, and what else it takes."""
LOOK = "see what the process does with `gpuckpt inspect --tree PID`; then report the traceback"


def interrupt_on_signals() -> None:
    """Until a flow takes them over, INT, TERM and HUP end the run in words. Ignored ones (nohup) stay so."""
    on_signals(_interrupt)


def on_signals(handler: Handler) -> None:
    """What INT, TERM and HUP do from here on. Ignored ones (nohup) stay so."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, handler)


def _interrupt(number: int, _frame: FrameType | None) -> None:
    # A second press while the words are written would be a traceback, and the status that of a bug.
    on_signals(signal.SIG_DFL)
    raise Interrupted(number, "interrupted before anything was begun", process="untouched")


def fail(error: BaseException, argv: Sequence[str]) -> int:
    """Show why the run ended and give its exit status."""
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    from gpuckpt.cli.render import present  # noqa: PLC0415  only failures and reports draw; TAB ends by SystemExit
    from gpuckpt.model.report import Report  # noqa: PLC0415

    expected = as_expected(error)
    command = next((word for word in argv if word in VISIBLE), "")
    if expected is None:
        import traceback  # noqa: PLC0415  only a bug shows one

        traceback.print_exception(error, file=sys.stderr)
        expected = GpuckptError(f"{type(error).__name__}: {error}", LOOK)
    if isinstance(expected, UsageError):
        expected.hint = _form_with_tree(argv) or expected.hint
    report = Report(command, outcome_of(expected), expected.process, error=expected)
    return present(report, Manner(json="--json" in argv), looked=type(expected) is not GpuckptError)


def as_expected(error: BaseException) -> GpuckptError | None:
    """The failure as one that has words; None for a bug."""
    if isinstance(error, GpuckptError):
        return error
    if isinstance(error, (KeyboardInterrupt, typer.Abort)):
        return Interrupted(signal.SIGINT, "interrupted before anything was begun", process="untouched")
    if isinstance(error, _wrong_usage()):
        return _usage(error)
    # What a signal interrupts can wrap it: the making of a class, up to Python 3.11.
    behind = error.__cause__ or error.__context__
    return as_expected(behind) if isinstance(behind, Interrupted) else None


def _wrong_usage() -> type[Exception]:
    # Typer's own base of "the command line makes no sense" has no public name; its public subclass has.
    base: type[Exception] = typer.BadParameter.__mro__[1]
    return base


def _usage(error: Any) -> UsageError:
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else "gpuckpt"
    option = getattr(error, "option_name", None)
    if command == "gpuckpt" and option in OF_ALL_VERBS:
        return UsageError(error.format_message(), f"put {option} after the command: gpuckpt COMMAND {option} ...")
    return UsageError(error.format_message(), f"{command} --help")


def _form_with_tree(argv: Sequence[str]) -> str:
    """`gpuckpt dump 4242 IMAGE` in the form that was meant; empty where something else is wrong."""
    verb, *words = argv or [""]
    named = {word.partition("=")[0] for word in words}
    if verb not in OF_A_TREE or not words or not words[0].isdecimal() or named & {"--tree", "--pid-file", "--unit"}:
        return ""
    return f"gpuckpt {verb} --tree {words[0]} {shlex.join(words[1:]) or OF_A_TREE[verb]}"


def outcome_of(error: GpuckptError) -> Outcome:
    """Refused: nothing was touched and the same command may work later."""
    return "refused" if error.status in (2, 10, 20, 21, 22) else "failed"

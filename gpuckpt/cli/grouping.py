"""Options that several commands share, given to each of them as one value."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

Shared = Mapping[str, tuple[Any, Any]]
"""Parameter -> its annotation for Typer, and its default."""


def grouped(
    parameter: str, shared: Shared, make: Callable[..., Any]
) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Give a command the shared options in the place of its `parameter`, which takes what `make` makes of them."""

    def decorate(command: Callable[..., int]) -> Callable[..., int]:
        def called(**given: Any) -> int:
            together = make(**{name: given.pop(name) for name in shared})
            return command(**given, **{parameter: together})

        told: list[inspect.Parameter] = []
        # Not typing.get_type_hints: Python 3.10 hides an Annotated whose default is None in an Optional.
        for name, one in inspect.signature(command, eval_str=True).parameters.items():
            told += [_option(option, *how) for option, how in shared.items()] if name == parameter else [one]
        called.__name__, called.__doc__, called.__module__ = command.__name__, command.__doc__, command.__module__
        # Where Typer looks for what a command takes.
        called.__signature__ = inspect.Signature(told)  # type: ignore[attr-defined]
        called.__annotations__ = {one.name: one.annotation for one in told}
        return called

    return decorate


def _option(name: str, hint: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hint)

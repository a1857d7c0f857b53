"""The words of a series' rules as values: its name, how many images stay, how long, and how much room is left."""

from __future__ import annotations

import re

import typer

from gpuckpt.model.series import MinFree, is_name

_SPAN_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 7 * 86400.0}


def span(text: str) -> float:
    """A span of time in seconds: a number and its unit, 30m, 24h, 7d."""
    match = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,6})?)([smhdw])", text)
    value = float(match[1]) * _SPAN_SECONDS[match[2]] if match else 0.0
    if value <= 0:
        raise typer.BadParameter(f"{text!r} is no span of time such as 30m, 24h or 7d.")
    return value


def room(text: str) -> str:
    """How much shall be free, as it is written: a share (10%) or a size (20G)."""
    if _room_of(text) is None:
        raise typer.BadParameter(f"{text!r} is neither a share such as 10% nor a size such as 20G.")
    return text


def min_free(text: str | None) -> MinFree | None:
    """The value of a text that `room` has let pass."""
    return None if text is None else _room_of(text)


def _room_of(text: str) -> MinFree | None:
    match = re.fullmatch(r"([0-9]{1,12}(?:\.[0-9]{1,6})?)(%|[KMGT]?)", text.upper().removesuffix("IB"))
    if match is None:
        return None
    value, unit = float(match[1]), match[2]
    if unit == "%":
        return MinFree(share=value / 100) if 0 < value < 100 else None
    size = int(value * 1024 ** ("KMGT".find(unit) + 1 if unit else 0))
    return MinFree(bytes=size) if size > 0 else None


def series_name(text: str) -> str:
    """The name of a series."""
    if not is_name(text):
        raise typer.BadParameter(f"{text!r} is no name: up to 100 letters, digits and . _ @ + - , no mark in front.")
    return text


def number(text: str) -> int:
    """How many images stay."""
    if not (text.isascii() and text.isdigit() and int(text[:9]) > 0 and len(text) < 10):
        raise typer.BadParameter(f"{text!r} is not a number from 1 on.")
    return int(text)

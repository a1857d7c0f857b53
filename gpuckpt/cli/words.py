"""Sizes, times and foreign texts as a person reads them."""

from __future__ import annotations

import datetime as dt
import re

_UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ud800-\udfff]")
_ESCAPES = {"\n": "\\n", "\t": "\\t", "\r": "\\r"}


def safe(text: object) -> str:
    """Foreign text on one line: bytes that are no text, and what could steer a terminal, shown as escapes."""
    return _UNPRINTABLE.sub(_escape, str(text))


def _escape(match: re.Match[str]) -> str:
    character = match.group()
    code = ord(character)
    if 0xDC80 <= code <= 0xDCFF:  # surrogateescape: a byte that was no UTF-8
        return f"\\x{code - 0xDC00:02x}"
    return _ESCAPES.get(character) or (f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}")


def size(count: float | None) -> str:
    """'18.6 GiB'; '?' when unknown."""
    if count is None:
        return "?"
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(value) < 999.5 or unit == "TiB":
            return f"{value:.0f} {unit}" if unit == "B" or abs(value) >= 99.95 else f"{value:.1f} {unit}"
        value /= 1024
    raise AssertionError


def duration(seconds: float | None) -> str:
    """'0.4 ms', '5.71 s', '3 min 20 s', '2 h 14 min', '3 d 4 h'; '?' when unknown."""
    if seconds is None:
        return "?"
    if seconds < 0.1:
        return f"{seconds * 1000:.1f} ms"
    if seconds < 100:
        return f"{seconds:.2f} s" if seconds < 9.995 else f"{seconds:.1f} s"
    minutes = int(seconds) // 60
    if minutes < 60:
        return f"{minutes} min {int(seconds) % 60} s"
    hours = minutes // 60
    return f"{hours} h {minutes % 60} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"


def moment(epoch: float) -> str:
    """'2026-11-30 07:19:01 UTC'; a time that no clock ever shows is given as its number."""
    try:
        return f"{dt.datetime.fromtimestamp(epoch, dt.timezone.utc):%Y-%m-%d %H:%M:%S} UTC"
    except (OverflowError, ValueError, OSError):
        return f"{epoch:.0f} s after 1970"


def rate(count: int | None, seconds: float | None) -> str:
    """'2.8 GiB/s'; empty when one of the two is unknown."""
    return f"{size(count / seconds)}/s" if count and seconds and seconds > 0.001 else ""


def count(number: int, noun: str, plural: str = "") -> str:
    """'1 process', '3 processes'."""
    return f"{number} {noun if number == 1 else plural or noun + 's'}"


def shorten(text: str, width: int, *, mark: str = "...") -> str:
    """The text cut to `width`, with a mark where something is missing."""
    return text if len(text) <= width else text[: max(0, width - len(mark))] + mark

"""The shape of a row."""

from __future__ import annotations

import re

from gpuckpt.model.records import dataclass

COPY_AGAIN = "verify the image (gpuckpt inspect --verify) and copy it again, or restore another one"


@dataclass(frozen=True, slots=True)
class Row:
    """One known failure. `also` must be found somewhere in the same log, when it is given."""

    id: str
    pattern: re.Pattern[str]
    cause: str
    remedy: str
    also: re.Pattern[str] | None = None


def row(identity: str, pattern: str, cause: str, remedy: str, also: str | None = None) -> Row:
    """A row from plain texts."""
    return Row(identity, re.compile(pattern), cause, remedy, re.compile(also) if also else None)

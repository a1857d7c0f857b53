"""The checks as the manual and --allow see them."""

from __future__ import annotations

from typing import Any


def known_checks(*lists: str) -> list[Any]:
    """All checks of the named lists (both by default), each once, in the order they are made."""
    import gpuckpt.checks  # noqa: PLC0415  only --allow and the manual need them

    found: dict[str, Any] = {}
    for name in lists or ("DUMP_CHECKS", "RESTORE_CHECKS"):
        for check in getattr(gpuckpt.checks, name, ()):
            found.setdefault(check.id, check)
    return list(found.values())


def known_ids(name: str) -> frozenset[str]:
    """A set of ids that the checks define."""
    import gpuckpt.checks  # noqa: PLC0415  as above

    found: frozenset[str] = getattr(gpuckpt.checks, name)
    return found

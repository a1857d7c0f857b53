"""The verbs, and how Typer is told of each; its function stands in the module of its name."""

from __future__ import annotations

from typing import Any

OF_A_TREE = "--tree PID [OPTIONS]"
VERBS: dict[str, dict[str, Any]] = {
    "dump": {"short_help": "Save a process tree as an image.", "options_metavar": OF_A_TREE},
    "inspect": {"short_help": "Say what an image, a running tree or this host is."},
    "restore": {"short_help": "Bring the tree of an image back, or repair one."},
    "push": {"short_help": "Copy an image to another host."},
    "pull": {"short_help": "Copy an image from another host."},
    "migrate": {"short_help": "Move a process tree to another host.", "options_metavar": OF_A_TREE},
    "serve": {"hidden": True},
}

VISIBLE = tuple(name for name, how in VERBS.items() if not how.get("hidden"))

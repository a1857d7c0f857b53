"""What is kept of a turn that went wrong: enough to say why without doing it again."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Sequence
from pathlib import Path

from tests.faults import arena
from tests.harness import Answer
from tests.soak import leftovers
from tests.soak.plan import Turn
from tests.soak.tree import Tree
from tests.soak.words import Wrong

FAILED = Path("/run/gpuckpt/failed")
"""Where gpuckpt keeps CRIU's logs of failed runs."""


def keep(
    directory: Path, turn: Turn, wrong: Wrong, words: Answer | None, tree: Tree | None, files: Sequence[Path]
) -> None:
    """Run directories with journal and CRIU's log, gpuckpt's words, the states of all processes, these files."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True, mode=0o700)
    said = f"{words.status}\n{words.report}\n{words.stderr}" if words else "nothing was said"
    (directory / "what").write_text(f"{turn}\n{wrong}\n\n{said}\n")
    if tree is not None:
        busy = "\n".join(leftovers.busy(tree.pids))
        (directory / "processes").write_text(f"{tree.describe()}\n\n{busy}\n")
        for run in arena.runs_of(*tree.pids):
            _copy(run, directory / "run" / run.name)
    for kept in sorted(FAILED.glob("*"), key=lambda path: path.stat().st_mtime)[-3:]:
        _copy(kept, directory / kept.name)
    for path in files:
        _copy(path, directory / path.name)


def _copy(path: Path, target: Path) -> None:
    with contextlib.suppress(OSError, shutil.Error):
        if path.is_dir():
            shutil.copytree(path, target, symlinks=True, ignore=shutil.ignore_patterns("gate"))
        elif path.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)

"""Images that were only on their way: what killed migrations have left of them, on either host."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from typing import TYPE_CHECKING

from gpuckpt.model.errors import GpuckptError
from gpuckpt.stores import directory

if TYPE_CHECKING:
    from pathlib import Path

KEPT_SECONDS = 7 * 86400.0
"""A week: one of them may be all that is left of a job (CRIU was killed and took it along)."""


def tidy(place: Path) -> None:
    """Remove what is older than that and that no gpuckpt has open. Raises nothing: it can be done another time."""
    with contextlib.suppress(OSError):
        for path in list(place.iterdir()):
            if time.time() - path.lstat().st_mtime > KEPT_SECONDS:
                remove(path)


def remove(path: Path, image_id: str | None = None) -> bool:
    """Remove an image, or one under work, unless somebody has it open; with `image_id` this image only."""
    try:
        held = _Partial(path) if path.name.endswith(directory.PARTIAL_SUFFIX) else directory.open_for_removal(path)
    except (GpuckptError, OSError):
        return False
    try:
        if image_id is not None and (isinstance(held, _Partial) or held.manifest.image_id != image_id):
            return False
        gone = path if isinstance(held, _Partial) else path.with_name(path.name + directory.PARTIAL_SUFFIX)
        if gone != path:
            path.rename(gone)
        shutil.rmtree(gone)
    except OSError:
        return False
    finally:
        held.close()
    return True


class _Partial:
    """An image under work whose maker has ended."""

    def __init__(self, path: Path) -> None:
        self._lock = directory.lock_partial(path)

    def close(self) -> None:
        os.close(self._lock)

"""Images that were only on their way: what killed migrations have left of them, on either host."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING

from gpuckpt.model.errors import GpuckptError
from gpuckpt.stores import directory, partialimage

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
        if path.name.endswith(partialimage.PARTIAL_SUFFIX):
            return image_id is None and bool(partialimage.remove_leftover(path))
        return _remove_image(path, image_id)
    except (GpuckptError, OSError):
        return False


def _remove_image(path: Path, image_id: str | None) -> bool:
    image = directory.open_for_removal(path)
    try:
        if image_id not in (None, image.manifest.image_id):
            return False
        directory.remove(image)
    finally:
        image.close()
    return True

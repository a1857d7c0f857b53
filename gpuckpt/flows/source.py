"""What becomes of the image here once its copy on the other host is verified: a note of the copy, or its end.

A confined push (flows/apart.py) has both done by the process that has kept its rights: it can read the image alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gpuckpt.flows import apart
from gpuckpt.model.errors import GpuckptError, MachineLacks, Refused, in_words
from gpuckpt.stores import directory, frames, protection

if TYPE_CHECKING:
    from gpuckpt.model.requests import PushRequest
    from gpuckpt.stores.directory import Image
    from gpuckpt.system.apart import Errand

PROTECT, DELETE = "protect", "delete"


def errands(request: PushRequest) -> dict[str, Errand]:
    """What a confined push of this request may ask for."""

    def note(asked: dict[str, Any]) -> dict[str, Any]:
        try:
            image = directory.open_image(request.image)
        except GpuckptError as error:
            return {"notes": [_not_noted(error)]}
        try:
            if image.manifest.image_id != asked["image_id"]:
                return {"notes": [f"{protection.NAME} was not written: {request.image} is another image by now"]}
            return {"notes": list(_note(image, request, str(asked["place"]), str(asked["verified"])))}
        finally:
            image.close()

    def remove(asked: dict[str, Any]) -> dict[str, Any]:
        try:
            _remove(request, str(asked["image_id"]))
        except GpuckptError as error:
            return frames.failure_to_json(error)
        return {}

    return {PROTECT: note, **({DELETE: remove} if request.delete_source else {})}


def protect(image: Image, request: PushRequest, place: str, verified: str) -> tuple[str, ...]:
    """Note the copy beside the image. Returns what went wrong, which costs nothing of the copy."""
    keeper = apart.keeper()
    if keeper is None:
        return _note(image, request, place, verified)
    try:
        told = keeper.ask(PROTECT, image_id=image.manifest.image_id, place=place, verified=verified)
        return tuple(str(words) for words in told["notes"])
    except OSError as error:
        return (_not_noted(error),)


def delete(request: PushRequest, image_id: str) -> None:
    """Remove the image. Raises Refused, Busy, MachineLacks."""
    keeper = apart.keeper()
    if keeper is None:
        _remove(request, image_id)
        return
    try:
        frames.raise_failure(keeper.ask(DELETE, image_id=image_id))
    except OSError as error:
        raise _not_removed(request, error) from None


def _note(image: Image, request: PushRequest, place: str, verified: str) -> tuple[str, ...]:
    try:
        protection.note(image.root, request.reach.location.host, place, verified)
    except OSError as error:
        return (_not_noted(error),)
    return ()


def _remove(request: PushRequest, image_id: str) -> None:
    image = directory.open_for_removal(request.image)
    try:
        if image.manifest.image_id != image_id:
            raise Refused(f"{image.path} is another image by now and was not removed", "look what is there")
        directory.remove(image)
    except OSError as error:
        raise _not_removed(request, error) from None
    finally:
        image.close()


def _not_noted(error: OSError | GpuckptError) -> str:
    return f"{protection.NAME} could not be written: {in_words(error)}"


def _not_removed(request: PushRequest, error: OSError) -> MachineLacks:
    return MachineLacks(
        f"the copy is complete, but {request.image} could not be removed: {in_words(error)}", "remove it by hand"
    )

"""The far side of push, pull, inspect and migrate: answers another gpuckpt until it goes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpuckpt.model.migration import QUESTIONS
from gpuckpt.stores.serving import Server, at_length, path_of
from gpuckpt.system.links import link_of_program

if TYPE_CHECKING:
    from gpuckpt.flows.receiving import Receiver
    from gpuckpt.stores.protocol import Ticker
    from gpuckpt.stores.serving import Answer
    from gpuckpt.system.links import Link


def serve(source: int, sink: int) -> None:
    """Serve one connection. Raises nothing of its own."""
    link = link_of_program(source, sink)
    migration = _Migration(link)
    try:
        own = {"host": _host, "series": _series, "images": lambda header, _payload: _images(link, header)}
        Server(link, {**own, **dict.fromkeys(QUESTIONS, migration.answer)}).run()
    finally:
        migration.close()


class _Migration:
    """Loaded where it is asked for: each connection of a push is a program of its own that has to start."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._receiver: Receiver | None = None

    def answer(self, header: dict[str, Any], payload: memoryview) -> Answer:
        if header["do"] == "judge" and "terms" not in header:
            return _judge(payload)
        if self._receiver is None:
            from gpuckpt.flows.receiving import Receiver  # noqa: PLC0415

            self._receiver = Receiver(self._link)
        return self._receiver.answer(header, payload)

    def close(self) -> None:
        if self._receiver is not None:
            self._receiver.close()


def _series(header: dict[str, Any], _payload: memoryview) -> Answer:
    """What `gpuckpt dump --push` wants done here once the image at `path` has come: the link, and who goes."""
    from gpuckpt.flows.pruning import Pruning  # noqa: PLC0415  as above
    from gpuckpt.model import series  # noqa: PLC0415
    from gpuckpt.model.jsonform import from_json, to_json  # noqa: PLC0415
    from gpuckpt.stores import series as stored  # noqa: PLC0415

    path, name = Path(str(header["path"])), str(header["name"])
    rules = from_json(series.Rules, header["rules"])
    if not path.is_absolute() or not series.is_name(name) or (series.parse(path.name) or ("",))[0] != name:
        raise ValueError(path)
    stored.refuse_other_latest(path.parent)
    pruning = Pruning(path.parent, name, rules)
    with stored.alone(path.parent, name):
        if stored.look(path).damage == "":
            stored.point_latest(path.parent, name, path.name)
        pruning.prune(path.name)
    said = {"removed": pruning.removed, "notes": pruning.notes, "findings": to_json(tuple(pruning.findings))}
    return {}, json.dumps(said).encode()


def _images(link: Link, header: dict[str, Any]) -> Answer:
    """What `gpuckpt inspect` says of a directory of images; nothing where it is none."""
    from gpuckpt.flows import listing  # noqa: PLC0415
    from gpuckpt.flows.interruption import Interruption  # noqa: PLC0415
    from gpuckpt.flows.machine import this_machine  # noqa: PLC0415
    from gpuckpt.model.requests import InspectRequest  # noqa: PLC0415

    class Asked(Interruption):
        """Whoever asked is told that it goes on, and ends it by going."""

        def __init__(self, tick: Ticker) -> None:
            super().__init__(None)
            self._tick = tick

        def check(self) -> None:
            self._tick(0, 0)

    place = Path(path_of(header))
    if not listing.holds_images(place):
        return {}, b""
    request, machine = InspectRequest(verify=header.get("verify") is True), this_machine(lambda _event: None)
    report = at_length(link, lambda tick: listing.inspect(place, request, machine, Asked(tick)))
    return {}, json.dumps(report.data).encode()


def _host(_header: dict[str, Any], _payload: memoryview) -> Answer:
    """What `gpuckpt inspect` says of this host."""
    from gpuckpt.flows import describe  # noqa: PLC0415
    from gpuckpt.flows.interruption import Interruption  # noqa: PLC0415
    from gpuckpt.flows.machine import this_machine  # noqa: PLC0415
    from gpuckpt.model.requests import InspectRequest  # noqa: PLC0415

    report = describe.inspect(InspectRequest(), this_machine(lambda _event: None), Interruption(None))
    return {}, json.dumps(report.to_json()).encode()


def _judge(payload: memoryview) -> Answer:
    """Whether this host could restore an image, by its manifest: no job comes (`inspect --against`)."""
    from gpuckpt.flows import judging  # noqa: PLC0415

    return {}, judging.answer(bytes(payload))

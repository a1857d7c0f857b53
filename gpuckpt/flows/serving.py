"""The far side of push, pull, inspect and migrate: answers another gpuckpt until it goes.

As root it gives root up before it reads or takes in an image, unless a job shall come with it: that takes root.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpuckpt.model.errors import Refused
from gpuckpt.model.migration import QUESTIONS
from gpuckpt.stores.serving import Server, at_length, path_of
from gpuckpt.system.confinement import Keep, confine
from gpuckpt.system.pipelink import link_of_program

if TYPE_CHECKING:
    from gpuckpt.flows.receiving import Receiver
    from gpuckpt.stores.protocol import Ticker
    from gpuckpt.stores.serving import Answer, Handler
    from gpuckpt.system.links import Link


def serve(source: int, sink: int) -> None:
    """Serve one connection. Raises nothing of its own."""
    link = link_of_program(source, sink)
    rights = _Rights()
    migration = _Migration(link, rights)
    more = {
        "host": rights.as_root(_host),
        "series": rights.for_series(_series),
        "images": rights.as_root(lambda header, _payload: _images(link, header)),
    }
    try:
        Server(link, {**more, **dict.fromkeys(QUESTIONS, rights.as_root(migration.answer))}, rights.give_up).run()
    finally:
        migration.close()


class _Rights:
    """What this process may still do."""

    def __init__(self) -> None:
        self._kept: Keep | None = None
        self._needed = os.geteuid() != 0
        """Nothing is given up: a job comes on this connection, or there is nothing to give up."""

    def need_root(self) -> None:
        """A job comes on this connection."""
        self._needed = True

    def give_up(self, keep: Keep) -> None:
        """All but `keep`, for good. Raises Refused where less is kept already."""
        if self._needed:
            return
        if self._kept is None:
            confine(keep)
            self._kept = keep
        if not self._kept.covers(keep):
            raise Refused("this connection is for another place", "use another one")

    def for_series(self, answer: Handler) -> Handler:
        """Answered with the rights to the directory of the series alone."""

        def kept(header: dict[str, Any], payload: memoryview) -> Answer:
            place = Path(str(header["path"])).parent
            if not place.is_absolute():
                raise ValueError(place)
            self.give_up(Keep(writes=(Path(os.path.realpath(place)),)))
            return answer(header, payload)

        return kept

    def as_root(self, answer: Handler) -> Handler:
        """Answered only while nothing was given up."""

        def judged(header: dict[str, Any], payload: memoryview) -> Answer:
            if self._kept is not None:
                raise Refused("this connection has given up what that question needs", "use another one")
            return answer(header, payload)

        return judged


class _Migration:
    """Loaded where it is asked for: each connection of a push is a program of its own that has to start."""

    def __init__(self, link: Link, rights: _Rights) -> None:
        self._link, self._rights = link, rights
        self._receiver: Receiver | None = None

    def answer(self, header: dict[str, Any], payload: memoryview) -> Answer:
        if header["do"] == "judge" and "terms" not in header:
            return _judge(payload)
        self._rights.need_root()
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

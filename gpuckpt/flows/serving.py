"""The far side of push, pull and inspect: answers another gpuckpt until it goes."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from gpuckpt.stores.serving import Server
from gpuckpt.system.links import link_of_program

if TYPE_CHECKING:
    from gpuckpt.stores.serving import Answer


def serve(source: int, sink: int) -> None:
    """Serve one connection. Raises nothing of its own."""
    Server(link_of_program(source, sink), {"host": _host}).run()


def _host(_header: dict[str, Any], _payload: memoryview) -> Answer:
    """What `gpuckpt inspect` says of this host."""
    # Loaded where it is asked for: each connection of a push is a program of its own that has to start.
    from gpuckpt.flows import describe  # noqa: PLC0415
    from gpuckpt.flows.interruption import Interruption  # noqa: PLC0415
    from gpuckpt.flows.machine import this_machine  # noqa: PLC0415
    from gpuckpt.model.requests import InspectRequest  # noqa: PLC0415

    report = describe.inspect(InspectRequest(), this_machine(lambda _event: None), Interruption(None))
    return {}, json.dumps(report.to_json()).encode()

"""The far side of a push or pull: answers one connection's questions over its stdin and stdout.

Every question is taken for hostile. A failure is answered and the connection goes on; a broken frame ends it.
One connection holds at most one image: the one it reads, or the one it takes in (`begin`), or a further stream
into one that another connection takes in (`join`).
"""

from __future__ import annotations

import contextlib
import errno
import os
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from gpuckpt.model import manifest as manifests
from gpuckpt.model.errors import GpuckptError, MachineLacks, Refused, TransferFailed, in_words
from gpuckpt.stores import frames
from gpuckpt.stores.landing import DirectoryArrival, make_parent
from gpuckpt.stores.landingwriter import DirectoryWriter
from gpuckpt.stores.local import DirectoryOffer, DirectoryReader, DirectoryStore
from gpuckpt.stores.packlanding import PackQuestions
from gpuckpt.stores.protocol import FRAME_SURPLUS_BYTES, PIECE_BYTES, Piece, Span
from gpuckpt.stores.series import behind_latest
from gpuckpt.system.confinement import Keep
from gpuckpt.system.links import LinkLost

if TYPE_CHECKING:
    from collections.abc import Callable

    from gpuckpt.stores.protocol import Ticker
    from gpuckpt.system.extents import Extent
    from gpuckpt.system.links import Link

    Answer = tuple[dict[str, Any], bytes | memoryview | Extent]
    Handler = Callable[[dict[str, Any], memoryview], Answer]

WORKING_SECONDS = 5.0
"""How often a long answer says that it is on its way."""

MOST_PAYLOAD = {
    "write": PIECE_BYTES,
    "sample": 2 * PIECE_BYTES,
    **dict.fromkeys(("begin", "judge"), manifests.MAX_BYTES),
}
T = TypeVar("T")
DONE: dict[str, Any] = {"ok": True}


class Server:
    """One connection."""

    def __init__(
        self, link: Link, more: dict[str, Handler] | None = None, confine: Callable[[Keep], None] = lambda _keep: None
    ) -> None:
        """`more`: questions that are answered by those who start it. `confine` is told what the next one needs."""
        self._link = link
        self._confine = confine
        self._buffer = frames.Buffer()
        self._offer: DirectoryOffer | None = None
        self._reader: DirectoryReader | None = None
        self._arrival: DirectoryArrival | None = None
        self._writer: DirectoryWriter | None = None
        self._packs = PackQuestions(path_of)
        self._most_payload = {**MOST_PAYLOAD, **self._packs.most_payload}
        self._handlers: dict[str, Handler] = {
            **self._packs.handlers,
            "ping": lambda _header, _payload: (DONE, b""),
            "open": self._open,
            "read": self._read,
            "check": self._check,
            "begin": self._begin,
            "join": self._join,
            "write": self._write,
            "verify": self._verify,
            "publish": self._publish,
            "leave": self._leave,
            **(more or {}),
        }

    def run(self) -> None:
        """Answer until the other side goes. Raises nothing of its own."""
        try:
            self._greet()
            while True:
                # A question is at most as large as a manifest; which one it is stands in the header.
                frame = frames.receive(self._link, self._buffer, manifests.MAX_BYTES)
                header, payload = self._answer(frame)
                frames.send(self._link, header, payload)
        except (LinkLost, frames.ProtocolBroken):
            return
        finally:
            self._let_go()

    def _greet(self) -> None:
        self._link.send(frames.MARK)
        frames.send(self._link, {**frames.hello(), "host": os.uname().nodename, "cores": len(os.sched_getaffinity(0))})
        answer = frames.receive(self._link, self._buffer).header
        if answer.get("protocol") not in range(frames.VERSIONS[0], frames.VERSIONS[1] + 1):
            raise frames.ProtocolBroken("a version that was not offered")

    def _answer(self, frame: frames.Frame) -> Answer:
        name = frame.header.get("do")
        handler = self._handlers.get(name) if isinstance(name, str) else None
        try:
            if handler is None:
                raise MachineLacks("this gpuckpt does not know that question", "install the same version on both hosts")
            if len(frame.payload) > self._most_payload.get(str(name), 0):
                raise Refused("more bytes than this question has", "do not trust the sender")
            return handler(frame.header, frame.payload)
        except GpuckptError as error:
            return frames.failure_to_json(error), b""
        except OSError as error:
            return frames.failure_to_json(_from_os(error)), b""
        except (KeyError, TypeError, ValueError, OverflowError):
            return frames.failure_to_json(Refused("a question without a sensible form", "do not trust the sender")), b""

    def _let_go(self) -> None:
        with contextlib.suppress(OSError):
            self._packs.close()
        for held in (self._reader, self._writer, self._offer, self._arrival):
            if held is not None:
                with contextlib.suppress(OSError):
                    held.close()

    def _open(self, header: dict[str, Any], _payload: memoryview) -> Answer:
        self._require_idle()
        place = behind_latest(Path(path_of(header)))
        self._confine(Keep(reads=(place,)))
        self._offer = DirectoryStore().offer(str(place))
        self._reader = self._offer.open_reader()
        told = {"signature": self._offer.signature.decode("ascii", "replace"), "name": place.name}
        return {**DONE, **told}, self._offer.raw_manifest

    def _read(self, header: dict[str, Any], _payload: memoryview) -> Answer:
        if self._reader is None:
            raise Refused("no image is open", "open one first")
        return {}, self._reader.extent(Span(*_numbers(header, "at")))

    def _check(self, _header: dict[str, Any], _payload: memoryview) -> Answer:
        if self._offer is None:
            raise Refused("no image is open", "open one first")
        return {"verified": self._at_length(self._offer.verify)}, b""

    def _begin(self, header: dict[str, Any], payload: memoryview) -> Answer:
        self._require_idle()
        target, once = Path(path_of(header)), self._packs.hand_over()
        signature = str(header.get("signature", "")).encode("ascii", "replace")
        make_parent(target)
        self._confine(Keep(writes=(target.parent,)))
        self._arrival = DirectoryArrival(target, bytes(payload), signature=signature)
        if once:
            self._arrival.resumable = False
            self._arrival.trust_packs()
        held = {str(index): found for index, found in self._arrival.held().items()}
        place = self._arrival.place
        return {"place": place, "already": self._arrival.already, "token": self._arrival.token, "held": held}, b""

    def _join(self, header: dict[str, Any], _payload: memoryview) -> Answer:
        if self._writer is not None:
            raise Refused("this connection writes already", "use another one")
        target = Path(path_of(header))
        self._confine(Keep(writes=(target.parent,)))
        self._writer = DirectoryWriter(target, None, str(header["token"]))
        return DONE, b""

    def _write(self, header: dict[str, Any], payload: memoryview) -> Answer:
        if self._writer is None:
            raise Refused("nothing is being taken in", "begin first")
        self._writer.send(Piece(*_numbers(header, "piece")), payload)
        return DONE, b""

    def _verify(self, _header: dict[str, Any], _payload: memoryview) -> Answer:
        if self._arrival is None:
            raise Refused("nothing is being taken in", "begin first")
        self._stop_writing()
        return {"bad": list(self._at_length(self._arrival.verify))}, b""

    def _publish(self, header: dict[str, Any], _payload: memoryview) -> Answer:
        if self._arrival is None:
            raise Refused("nothing is being taken in", "begin first")
        self._stop_writing()
        arrival, durable = self._arrival, header.get("durable") is not False
        return {"verified": self._at_length(lambda _tick: arrival.publish(durable=durable))}, b""

    def _leave(self, _header: dict[str, Any], _payload: memoryview) -> Answer:
        self._let_go()
        self._reader = self._writer = self._offer = self._arrival = None
        return DONE, b""

    def _stop_writing(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _require_idle(self) -> None:
        if self._offer is not None or self._arrival is not None:
            raise Refused("this connection holds an image already", "use another one")

    def _at_length(self, act: Callable[[Ticker], Any]) -> Any:
        return at_length(self._link, act)


def at_length(link: Link, act: Callable[[Ticker], T]) -> T:
    """Carry out what takes long, telling the other side that it goes on; its end ends it. Raises LinkLost."""
    state = {"at": [0, 0], "gone": False}

    def tick(done: int, total: int) -> None:
        state["at"] = [done, total]
        if state["gone"]:
            raise LinkLost("nobody waits any more")

    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(act, tick)
        try:
            while not wait([future], WORKING_SECONDS).done:
                frames.send(link, {"working": state["at"]})
        except LinkLost:
            state["gone"] = True
            raise
    return future.result()


def path_of(header: dict[str, Any]) -> str:
    """The path of a question, from the login directory on; links before its last step are resolved this once."""
    text = header["path"]
    if not isinstance(text, str) or "\0" in text:
        raise ValueError(text)
    path = Path(os.path.abspath(Path(text or ".").expanduser()))  # noqa: PTH100 - the last step must stay a name
    return str(Path(os.path.realpath(path.parent)) / path.name)


def _numbers(header: dict[str, Any], place: str) -> list[int]:
    """Part, place in it and size. Raises KeyError, ValueError."""
    values = [header[name] for name in ("part", place, "size")]
    most = PIECE_BYTES + FRAME_SURPLUS_BYTES if place == "at" else PIECE_BYTES
    if not all(type(value) is int and 0 <= value < 1 << 60 for value in values) or values[2] > most:
        raise ValueError(values)
    return values


def _from_os(error: OSError) -> GpuckptError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return TransferFailed(f"the disk is full: {in_words(error)}", "make room there; the same command continues it")
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return MachineLacks(
            in_words(error), "choose a directory this user may write to, or --remote-command 'sudo -n gpuckpt'"
        )
    return TransferFailed(in_words(error), "mend that; the same command continues it")

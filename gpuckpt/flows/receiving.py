"""The far side of a migration: judges a job that may come, brings its copy up to where it could run, lets it go.

    judge     the draft of a manifest: all restore checks, nothing is touched
    warm      what can be done before the job stands still: the copy's owner is started, what was sent before unpacked
    prepare   the image that has arrived comes up, held: memory in, GPU restored, no instruction run
    go        the copy runs from here on, unless somebody decided otherwise (owner/decision.py)
    watch     how it does
    verdict   on any connection: what became of `go`; a copy that was not let go yet never will be
    finish    the other side knows how it ended
    discard   the images that were sent are not needed: the job goes on where it was
    sample    some bytes, to see how fast they travel

The end of the connection before `go` ends the copy, which has not run; so does the death of this process, for then
the copy's owner sees an end of file, and the owner's death, by the kernel (PTRACE_O_EXITKILL). After `go` it runs.
"""

from __future__ import annotations

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from gpuckpt import checks
from gpuckpt.flows import carrying, gather, ground, hooks, tidying
from gpuckpt.flows import restore as restoring
from gpuckpt.flows.interruption import Interruption
from gpuckpt.flows.machine import this_machine
from gpuckpt.flows.places import require_places
from gpuckpt.flows.reporting import reported
from gpuckpt.images import warmframes
from gpuckpt.images.warmframes import WarmFrames
from gpuckpt.model import manifest as manifests
from gpuckpt.model.errors import GpuckptError, MachineLacks, Refused, RestoreFailed
from gpuckpt.model.jsonform import from_json, to_json
from gpuckpt.model.migration import INCOMING_PLACE, QUESTIONS, Terms, Verdict
from gpuckpt.model.report import Report
from gpuckpt.model.requests import RestoreRequest
from gpuckpt.owner import decision, runs
from gpuckpt.owner.handle import SpareOwner
from gpuckpt.stores import directory, frames, partialimage
from gpuckpt.stores.landingwriter import partial_path
from gpuckpt.system import limits, procfs
from gpuckpt.system.links import LinkLost

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from gpuckpt.images.framesource import FrameSource
    from gpuckpt.images.packindex import Index
    from gpuckpt.images.warmframes import Warm
    from gpuckpt.stores.serving import Answer, Handler
    from gpuckpt.system.links import Link

    T = TypeVar("T")

LOOK_SECONDS = 0.05
WORKING_SECONDS = 5.0
DISCARD_SECONDS = 10.0


class Copy(threading.Thread):
    """The restore of a copy, which stops where it could let it run. A Departure."""

    def __init__(self, request: RestoreRequest, terms: Terms, warm: Warm, spare: SpareOwner | None) -> None:
        super().__init__(name="copy", daemon=True)
        self.transaction, self.terms = terms.transaction, terms
        self.interruption, self.ground = Interruption(None), ground.Ground()
        self.report: Report | None = None
        """How it ended."""
        self.stands_ready, self.runs, self.over = threading.Event(), threading.Event(), threading.Event()
        self.may_run = threading.Event()
        self.decided = threading.Event()
        """It stands ready, or it is over."""
        self._request, self._warm, self.spare = request, warm, spare

    def run(self) -> None:
        """Bring it up, wait, let it run, look at it."""
        try:
            self.ground.make(self.terms)
            self.report = reported("restore", self._restore)
        except OSError as error:
            failed = RestoreFailed(f"{error.filename} cannot be made: {error.strerror}", "look at what is there")
            self.report = Report("restore", "failed", "untouched", error=failed)
        except Exception as error:  # noqa: BLE001 - the other side must hear of it, and resume its own
            failed = RestoreFailed(f"{type(error).__name__}: {error}", "this is a bug in gpuckpt")
            self.report = Report("restore", "failed", "untouched", error=failed)
        finally:
            if not self.runs.is_set():
                self.ground.take_back()
            ground.tidy()
            self.over.set()
            self.decided.set()

    def _restore(self) -> Report:
        limits.require_descriptors()
        return restoring.restore(self._request, this_machine(lambda _event: None), self.interruption, self)

    def frames(self, source: FrameSource, index: Index) -> FrameSource:
        """With those of the image that was sent before."""
        return WarmFrames(source, index, self._warm)

    def ready(self) -> None:
        """It stands ready: wait for `go`."""
        self.ground.set_times()
        self.stands_ready.set()
        self.decided.set()
        while not self.may_run.wait(LOOK_SECONDS):
            self.interruption.check()

    def running(self) -> None:
        """It runs."""
        self.ground.keep()
        self.runs.set()
        while self._warm:  # one by one: all at once would hold up the answer to `go`
            self._warm.popitem()

    def end(self) -> None:
        """The other side has gone: what does not run yet never will."""
        self.interruption.break_off("the other host has gone")
        self.join()


class Receiver:
    """One connection's part in a migration."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._copy: Copy | None = None
        self._warmed: Warm = {}
        self._spare: SpareOwner | None = None
        self._handlers: dict[str, Handler] = {name: getattr(self, f"_{name}") for name in QUESTIONS}

    def answer(self, header: dict[str, Any], payload: memoryview) -> Answer:
        """Answer one of QUESTIONS. Raises GpuckptError, LinkLost, OSError, KeyError, TypeError, ValueError."""
        return self._handlers[header["do"]](header, payload)

    def close(self) -> None:
        """The connection has ended."""
        if self._copy is not None:
            self._copy.end()
            if self._copy.runs.is_set():
                _put_away(self._copy.terms)
        if self._spare is not None:
            self._spare.close()

    def _judge(self, header: dict[str, Any], payload: memoryview) -> Answer:
        terms = from_json(Terms, header["terms"])
        draft = manifests.decode(bytes(payload), "the draft")
        request = _request(terms)
        require_places(request.stdio)
        runs.refuse_busy(draft.tree.ids)
        contents = self._at_length(lambda: carrying.compare(_digests(header), self._require_link))
        facts = gather.restore_facts(request, draft, this_machine(lambda _event: None), {})
        here = carrying.as_if_made(facts.files_here, terms.directories)
        facts = replace(facts, files_here=here, contents=contents)
        judged = checks.judge(checks.RESTORE_CHECKS, facts, request.allow)
        findings = (*hooks.before_it(judged, "restore", request.hooks), *carrying.room(draft, request.image.parent))
        told = {
            "findings": to_json(findings),
            "place": str(request.image),
            "space_bytes": gather.free_bytes(request.image.parent),
        }
        return {}, json.dumps(told).encode()

    def _warm(self, header: dict[str, Any], _payload: memoryview) -> Answer:
        """While the job still runs: start an owner, and unpack the image that was sent before if there is room."""
        terms = from_json(Terms, header["terms"])
        if self._spare is None:
            self._spare = SpareOwner()
        if not terms.seed:
            return {"bytes": 0}, b""
        image = directory.open_image(_place(replace(terms, name=terms.seed)))
        try:
            room = gather.free_memory_bytes() // 2 - image.manifest.bytes_raw
            self._warmed = self._at_length(lambda: warmframes.warm(image.part("packs"), room, self._require_link))
        finally:
            image.close()
        return {"bytes": sum(size for _, size in self._warmed)}, b""

    def _prepare(self, header: dict[str, Any], _payload: memoryview) -> Answer:
        if self._copy is not None:
            raise Refused("this connection has a copy already", "use another one")
        terms = from_json(Terms, header["terms"])
        decision.forget_old()
        tidying.tidy(Path(INCOMING_PLACE))
        self._copy = Copy(_request(terms), terms, self._warmed, self._spare)
        self._copy.start()
        self._until(self._copy.decided.wait)
        if self._copy.stands_ready.is_set() and not self._copy.over.is_set():
            return {"ready": True}, b""
        raise self._failure(self._copy)

    def _go(self, _header: dict[str, Any], _payload: memoryview) -> Answer:
        """From here on no end of the link counts: what the owner does stands."""
        copy = self._the_copy()
        copy.may_run.set()
        while not copy.runs.wait(LOOK_SECONDS) and not copy.over.is_set():
            pass
        return {"verdict": "running" if copy.runs.is_set() else _verdict(copy.transaction)}, b""

    def _watch(self, _header: dict[str, Any], _payload: memoryview) -> Answer:
        copy = self._the_copy()
        self._until(copy.over.wait)
        assert copy.report is not None  # noqa: S101 - it is over
        told = copy.report.to_json()
        told["data"] = {**told["data"], "notes": [*(told["data"].get("notes") or ()), *copy.ground.notes]}
        return {}, json.dumps(told).encode()

    def _verdict(self, header: dict[str, Any], _payload: memoryview) -> Answer:
        return {"verdict": _verdict(header["transaction"])}, b""

    def _finish(self, header: dict[str, Any], _payload: memoryview) -> Answer:
        terms = from_json(Terms, header["terms"])
        decision.forget(terms.transaction)
        if terms.directory:
            partialimage.sync_below(_place(terms))
        _put_away(terms)
        return {}, b""

    @staticmethod
    def _discard(header: dict[str, Any], _payload: memoryview) -> Answer:
        """Also where the connection that had the image has not seen yet that it was closed."""
        terms, until = from_json(Terms, header["terms"]), time.monotonic() + DISCARD_SECONDS
        before = _sent_before(terms)
        # Of one that was broken off on its way nothing is of use: the next attempt has other names.
        wanted: dict[Path, str | None] = dict.fromkeys((*before, *map(partial_path, before)))
        wanted[_place(terms)] = terms.transaction
        while _cannot_remove(wanted) and time.monotonic() < until:
            time.sleep(LOOK_SECONDS)
        return {}, b""

    @staticmethod
    def _sample(_header: dict[str, Any], _payload: memoryview) -> Answer:
        return {}, b""

    def _the_copy(self) -> Copy:
        if self._copy is None:
            raise Refused("this connection has no copy", "prepare one first")
        return self._copy

    def _at_length(self, act: Callable[[], T]) -> T:
        """Do what may take long; `act` looks for the end of the connection."""
        with ThreadPoolExecutor(1) as pool:
            future = pool.submit(act)
            self._until(lambda seconds: bool(wait([future], seconds).done))
            return future.result()

    def _require_link(self) -> None:
        if self._link.has_ended():
            raise LinkLost("the other host has gone")

    def _until(self, done: Callable[[float], bool]) -> None:
        """Wait, and say that work goes on; `done` waits for so many seconds itself. Raises LinkLost.

        The end of the connection breaks off what does not run yet.
        """
        said = time.monotonic()
        while not done(LOOK_SECONDS):
            self._require_link()
            if time.monotonic() - said > WORKING_SECONDS:
                said = time.monotonic()
                frames.send(self._link, {"working": [0, 0]})

    @staticmethod
    def _failure(copy: Copy) -> GpuckptError:
        report = copy.report
        if report is None or report.error is None:
            return RestoreFailed("the copy came to an end before it could run", "try again")
        return report.error


def _put_away(terms: Terms) -> None:
    """Remove what was not to stay: the image, unless it has a directory, and those that were sent before."""
    if not terms.directory:
        tidying.remove(_place(terms), terms.transaction)
    _remove_sent_before(terms)


def _remove_sent_before(terms: Terms) -> None:
    for path in _sent_before(terms):
        tidying.remove(path)


def _cannot_remove(wanted: Mapping[Path, str | None]) -> list[Path]:
    """Of these paths -> which image; what is there all the same."""
    return [path for path, image_id in wanted.items() if path.exists() and not tidying.remove(path, image_id)]


def _sent_before(terms: Terms) -> list[Path]:
    return [_place(replace(terms, name=name)) for name in (terms.seed, terms.files) if name]


def _digests(header: dict[str, Any]) -> dict[str, str]:
    """Path -> BLAKE3. Raises ValueError, TypeError."""
    found = {str(path): str(digest) for path, digest in dict(header.get("digests") or {}).items()}
    if any(not path.startswith("/") or "\0" in path for path in found):
        raise ValueError(found)
    return found


def _request(terms: Terms) -> RestoreRequest:
    return RestoreRequest(
        image=_place(terms),
        stdio={int(number): Path(path) for number, path in terms.stdio.items()},
        gpu_map=terms.gpu_map,
        allow=frozenset(terms.allow),
        settle_seconds=terms.settle_seconds,
        force_program=terms.force_program,
        huge_pages=terms.huge_pages,
        overwrite_files=True,
        hooks=terms.hooks,
        readiness=terms.readiness,
    )


def _place(terms: Terms) -> Path:
    if "/" in terms.name or terms.name in ("", ".", "..") or not decision.NAME.fullmatch(terms.transaction):
        raise ValueError(terms.name)
    made = (*(one.path for one in terms.directories), *(one.path for one in terms.links))
    paths = (*terms.stdio.values(), *made)
    if any(not path.startswith("/") or ".." in path.split("/") or "\0" in path for path in paths):
        raise ValueError(paths)
    return Path(terms.directory or INCOMING_PLACE).expanduser().absolute() / terms.name


def _verdict(transaction: str) -> Verdict:
    """What became of a copy; one that was not let go yet never will be from here on."""
    try:
        stands = decision.decide(transaction, "cancelled")
    except OSError as error:
        raise MachineLacks(f"/run cannot be written: {error.strerror}", "make room in /run") from None
    if stands.word == "cancelled":
        return "cancelled"
    root = stands.ids[:1]
    return "running" if any(procfs.state(one) not in procfs.ENDED for one in root) else "ended"

"""The other host of a migration, as the host that gives the job away sees it: questions, and their answers."""

from __future__ import annotations

import json
import queue
import threading
import time
from typing import TYPE_CHECKING, Any, TypeVar

from gpuckpt.flows import far
from gpuckpt.model.errors import GpuckptError, MachineLacks, TransferFailed
from gpuckpt.model.jsonform import FormError, from_json, to_json
from gpuckpt.model.migration import VERDICTS, Terms, Verdict
from gpuckpt.model.records import dataclass
from gpuckpt.model.report import Finding
from gpuckpt.stores.ssh import SshStore
from gpuckpt.system.links import LinkLost
from gpuckpt.system.ssh_failures import NotReached

if TYPE_CHECKING:
    from collections.abc import Callable

    from gpuckpt.checks.facts import DumpFacts
    from gpuckpt.model.requests import Reach

    T = TypeVar("T")

MOST_REPORT = 16 << 20
MOST_FINDINGS = 1000
MOST_NOTES = 100
MOST_TEXT = 1000
FROM_THERE = ("cgroup", "gpu_memory_bytes", "files", "ready_seconds")
"""What the report takes over from the copy's."""

LOOK_SECONDS = 0.1
GO_SECONDS = 15.0
"""How long `go` may take to be answered: there is nothing left to do there but to let go."""

ASK_SECONDS = 30.0
"""How long a `go` without an answer is asked about. The job stands still here, or runs there already."""

AGAIN_SECONDS = 1.0
ALIVE_SECONDS = 10.0
SAMPLE_BYTES = 8 << 20


def beside(act: Callable[[], T], meanwhile: Callable[[], None]) -> T:
    """Do what waits for another host, and look around; what `meanwhile` raises leaves it behind."""
    outcome: queue.SimpleQueue[T | BaseException] = queue.SimpleQueue()

    def work() -> None:
        try:
            outcome.put(act())
        except BaseException as error:  # noqa: BLE001 - it is raised in the thread that waits
            outcome.put(error)

    threading.Thread(target=work, daemon=True).start()
    while True:
        try:
            found = outcome.get(timeout=LOOK_SECONDS)
        except queue.Empty:
            meanwhile()
            continue
        if isinstance(found, BaseException):
            raise found
        return found


@dataclass(frozen=True, slots=True)
class Judged:
    """What the other host says of a job that may come."""

    findings: tuple[Finding, ...]
    place: str
    """Where its image will lie."""
    space_bytes: int | None


@dataclass(frozen=True, slots=True)
class Watched:
    """What the other host says of the copy that runs."""

    data: dict[str, Any]
    seconds: dict[str, float]
    notes: tuple[str, ...]
    trouble: str | None
    """Why it is not well."""


class Destination:
    """A host with a gpuckpt that takes jobs in."""

    def __init__(self, reach: Reach, meanwhile: Callable[[], None]) -> None:
        """Connect and greet. Raises GpuckptError, and what `meanwhile` raises."""
        self._reach = reach
        self._alive_at = time.monotonic()
        self.store = _gpuckpt_of(reach, meanwhile)
        self.name = str(self.store.first.hello.get("host") or reach.location.host)[:64]

    @property
    def where(self) -> str:
        """As it was named."""
        return self._reach.location.host

    def judge(self, terms: Terms, draft: bytes, digests: dict[str, str], meanwhile: Callable[[], None]) -> Judged:
        """All restore checks there; files with these digests are compared. Raises GpuckptError."""
        question = {"do": "judge", "terms": to_json(terms), "digests": digests}
        answer = self._ask(question, meanwhile, payload=draft)
        try:
            told = json.loads(answer)
            findings = tuple(from_json(Finding, one) for one in list(told["findings"])[:MOST_FINDINGS])
            space = told["space_bytes"]
            return Judged(findings, str(told["place"]), space if type(space) is int else None)
        except (ValueError, TypeError, KeyError, RecursionError, FormError):
            raise TransferFailed(f"{self.where} tells nothing that can be read", "do not trust it") from None

    def warm(self, terms: Terms, meanwhile: Callable[[], None]) -> int:
        """The image that was sent before is unpacked into memory there; returns how many bytes of it were.

        Where that fails nothing is lost but time: it is unpacked when it is needed. Raises what `meanwhile` raises.
        """
        question = {"do": "warm", "terms": to_json(terms)}
        try:
            return int(beside(lambda: self.store.question(question).header["bytes"], meanwhile))
        except (LinkLost, GpuckptError, KeyError, TypeError, ValueError):
            return 0

    def prepare(self, terms: Terms, meanwhile: Callable[[], None]) -> None:
        """The copy comes up there, held. Raises GpuckptError, and what `meanwhile` raises: then it ends there."""
        try:
            self._ask({"do": "prepare", "terms": to_json(terms)}, meanwhile)
        except BaseException:
            self.close()
            raise

    def go(self, transaction: str, meanwhile: Callable[[], None]) -> Verdict | None:
        """Let it run there, and make sure that it does; None when nobody can tell. Raises nothing of its own.

        What `meanwhile` raises ends only the asking.
        """
        until = time.monotonic() + GO_SECONDS

        def patience() -> None:
            if time.monotonic() > until:
                raise LinkLost("no answer")

        try:
            return beside(lambda: _read_verdict(self.store.question({"do": "go"}).header), patience)
        except (LinkLost, GpuckptError):
            self.close()
            return self._ask_again(transaction, meanwhile)

    def _ask_again(self, transaction: str, meanwhile: Callable[[], None]) -> Verdict | None:
        until = time.monotonic() + ASK_SECONDS
        while True:
            try:
                self.store = _gpuckpt_of(self._reach, meanwhile)
                verdict = beside(lambda: self._verdict(transaction), meanwhile)
            except (LinkLost, GpuckptError):
                verdict = None
            if verdict is not None or time.monotonic() > until:
                return verdict
            time.sleep(AGAIN_SECONDS)
            meanwhile()

    def _verdict(self, transaction: str) -> Verdict | None:
        return _read_verdict(self.store.question({"do": "verdict", "transaction": transaction}).header)

    def watch(self, meanwhile: Callable[[], None]) -> Watched:
        """How the copy does, out of a restore's report. Raises GpuckptError, ValueError for what is none."""
        report = json.loads(self._ask({"do": "watch"}, meanwhile))
        try:
            data, error = dict(report["data"]), report["error"]
            seconds = {str(phase): float(took) for phase, took in dict(data.get("seconds") or {}).items()}
            notes = tuple(str(note)[:MOST_TEXT] for note in list(data.get("notes") or ())[:MOST_NOTES])
            kept = {key: data[key] for key in FROM_THERE if key in data}
            return Watched(kept, seconds, notes, None if error is None else str(error["message"])[:MOST_TEXT])
        except (TypeError, KeyError, ValueError):
            raise FormError("it sent no report") from None

    def finish(self, terms: Terms, meanwhile: Callable[[], None]) -> None:
        """It knows how it ended; an image that was to go is removed there. Raises GpuckptError."""
        self._ask({"do": "finish", "terms": to_json(terms)}, meanwhile)

    def discard(self, terms: Terms) -> None:
        """The images that were sent are not needed. Raises GpuckptError."""
        self._ask({"do": "discard", "terms": to_json(terms)}, lambda: None)

    def bytes_per_second(self, meanwhile: Callable[[], None]) -> float:
        """How fast one connection takes bytes. Raises GpuckptError."""
        sample = bytes(SAMPLE_BYTES)
        begun = time.monotonic()
        self._ask({"do": "sample"}, meanwhile, payload=sample)
        return SAMPLE_BYTES / max(time.monotonic() - begun, 1e-6)

    def _ask(self, question: dict[str, Any], meanwhile: Callable[[], None], *, payload: bytes = b"") -> bytes:
        """The payload of an answer. Raises GpuckptError."""
        try:
            return beside(lambda: bytes(self.store.question(question, payload, most=MOST_REPORT).payload), meanwhile)
        except LinkLost as lost:
            raise TransferFailed(f"the connection to {self.where} was lost: {lost}", "repeat the command") from None

    def keep_alive(self) -> None:
        """Say that we live, where nothing else is said. Raises GpuckptError."""
        if time.monotonic() - self._alive_at < ALIVE_SECONDS:
            return
        self._alive_at = time.monotonic()
        try:
            self.store.keep_alive()
        except LinkLost as lost:
            raise TransferFailed(f"the connection to {self.where} was lost: {lost}", "repeat the command") from None

    def close(self) -> None:
        """End the connection: a copy that does not run yet ends there."""
        self.store.close()


@dataclass(frozen=True, slots=True)
class Look:
    """Both hosts as they were seen, and what the checks say of them."""

    facts: DumpFacts
    there: Destination
    terms: Terms
    findings: tuple[Finding, ...]
    plan: dict[str, Any]


def _gpuckpt_of(reach: Reach, meanwhile: Callable[[], None]) -> SshStore:
    try:
        store = beside(lambda: far.connect(reach), meanwhile)
    except (LinkLost, NotReached) as lost:
        raise far.as_failure(reach, lost) from None
    if not isinstance(store, SshStore):
        store.close()
        raise MachineLacks(
            f"{reach.location.host} has no gpuckpt that answers ({store.why}): it can store images, not take a job in",
            "install gpuckpt there, or name it with --remote-command",
        )
    hello = store.first.hello
    features = hello.get("features")
    if not isinstance(features, list) or "migrate" not in features:
        store.close()
        raise MachineLacks(
            f"gpuckpt {str(hello.get('gpuckpt'))[:40]} on {reach.location.host} takes no jobs in: it is too old",
            "install the same version of gpuckpt on both hosts",
        )
    return store


def _read_verdict(header: dict[str, Any]) -> Verdict | None:
    word = header.get("verdict")
    return word if word in VERDICTS else None

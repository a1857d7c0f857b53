"""The soak: dumps and restores of small trees, each with a blow at some moment, and a look at what became of it.

A block of turns is done on one tree. When it lies in an image the next turn is a restore, else mostly a dump. After
each turn the promise is looked at: a dump leaves the tree at work or in an image that restores; a restore leaves a
whole tree at work or none, and the image restores. A run that succeeds leaves nothing behind of those before it.
"""

from __future__ import annotations

import contextlib
import shutil
import signal
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from tests.faults import arena
from tests.faults.arena import Shot
from tests.harness import Answer, gpuckpt
from tests.soak import blows, evidence, leftovers
from tests.soak.blows import Length
from tests.soak.plan import BLOCK, KINDS, Turn, turn
from tests.soak.tree import Tree
from tests.soak.words import Wrong, died_of, require_true_dump, require_true_restore, stderr_of

NO_SETTLE = ("--settle", 0)
QUIET_SECONDS = 150.0
"""An orphaned CRIU may take 90 s to let go."""


@dataclass
class Soak:
    """A soak at work; `counts` and `wrongs` are its result."""

    place: Path
    seed: int
    kinds: tuple[str, ...] = KINDS
    """Trees whose undisturbed runs are measured; those of other kinds take the first one's lengths."""
    counts: Counter[str] = field(default_factory=Counter)
    wrongs: list[dict[str, object]] = field(default_factory=list)
    lengths: dict[tuple[str, str, bool, bool], Length] = field(default_factory=dict)
    _tree: Tree | None = None
    _saved: bool = False
    _before: frozenset[str] = frozenset()
    _last_words: Answer | None = None
    _network: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def begin(self) -> None:
        """Become the parent of everything, in a network of our own, and measure the undisturbed runs."""
        self._network.enter_context(leftovers.own_network())
        arena.become_subreaper()
        self.place.chmod(0o700)
        self._before = leftovers.host_wide()
        for kind in self.kinds:
            for plain in (False, True):
                self._measure(kind, plain)

    def _measure(self, kind: str, plain: bool) -> None:
        options = ["--plain"] * plain
        self._start(kind)
        for leave_running in (True, False):
            more = ["--leave-running"] * leave_running
            self._remove_image()
            length = blows.measure("dump", "--tree", self._tree.root, self.image, *NO_SETTLE, *options, *more)
            self.lengths["dump", kind, plain, leave_running] = length
        restored = blows.measure("restore", self.image, *NO_SETTLE, *options)
        self.lengths["restore", kind, plain, False] = restored
        assert self._tree.look() == "advancing"
        self._end_tree()

    @property
    def image(self) -> Path:
        """Where every dump puts its image: a later dump must cope with what an earlier one left there."""
        return self.place / "img"

    def run(self, number: int) -> bool:
        """Do one turn; False when something was wrong. The evidence then lies in a directory that is named."""
        plan = turn(self.seed, number)
        if number % BLOCK == 0 or self._tree is None:
            self._end_tree()
            self._start(plan.kind)
        try:
            if plan.restore and not self._saved:
                self._dump_undisturbed(plan.plain)
            self._restore_turn(plan) if self._saved else self._dump_turn(plan)
            if number % BLOCK == BLOCK - 1:
                self._close_block()
        except Wrong as wrong:
            self._note(plan, wrong)
            self._end_tree()
            return False
        finally:
            leftovers.reap_orphans()
        return True

    def end(self) -> None:
        """End the tree, and see that nothing at all has stayed."""
        self._end_tree()
        self._remove_image()
        leftovers.reap_orphans()
        self._network.close()
        arena.become_subreaper(on=False)

    def _start(self, kind: str) -> None:
        directory = self.place / "tree"
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir()
        self._tree, self._saved = Tree.start(kind, directory), False

    def _end_tree(self) -> None:
        if self._tree is not None:
            self._tree.end()
            self._tree = None
        self._remove_image()

    def _remove_image(self) -> None:
        shutil.rmtree(self.image, ignore_errors=True)

    def _dump_turn(self, plan: Turn) -> None:
        self.counts["dumps"] += 1
        options = plan.dump_options()
        answer = self._shoot(plan, "dump", "--tree", self._tree.root, self.image, *NO_SETTLE, *options)
        seen = self._look(plan, answer)
        complete = self.image.exists()
        if self._is_doubted(plan, answer):
            return
        if seen in ("gone", "part"):
            if self._taken_along(plan, answer, complete=complete):
                return
            if seen == "part" or not complete:
                raise Wrong("lost", f"the tree is {seen}, an image: {complete}")
        elif seen != "advancing":
            raise Wrong("dead connection" if seen == "dead" else "frozen", f"after a dump the tree is {seen}")
        if answer is not None and answer.status == 22:
            self._repair_as_told(answer)
            return
        require_true_dump(answer, seen, complete=complete)
        if answer is not None and answer.report["process"] != "untouched" and self._partial.exists():
            raise Wrong("left behind", f"{self._partial} after a dump that could speak")
        self.counts["dump: goes on" if seen == "advancing" else "dump: ended, complete image"] += 1
        if complete:
            self._adopt_image(seen)

    def _repair_as_told(self, answer: Answer) -> None:
        """The blow fell on the owner that clears up after an earlier turn: nothing was touched, the hint helps."""
        repaired = gpuckpt("restore", "--tree", self._tree.root)
        named = f"restore --tree {self._tree.root}" in answer.error["hint"]
        if not named or (repaired.status, repaired.report["process"]) != (0, "running"):
            raise Wrong("left behind", f"22, {answer.error}, and the repair: {repaired.status} {repaired.error}")
        self.counts["dump: refused (22), repaired as it said"] += 1
        self._require_nothing_left()

    def _adopt_image(self, seen: str) -> None:
        """An image that is called complete must verify, and is what the next turn restores."""
        verified = gpuckpt("inspect", "--verify", self.image)
        if verified.status != 0:
            raise Wrong("bad image", f"inspect --verify: {verified.status} {verified.error}")
        if seen == "advancing":
            self.counts["dump: goes on, complete image"] += 1
            self._tree.kill()
        self._saved = True

    def _taken_along(self, plan: Turn, answer: Answer | None, *, complete: bool) -> bool:
        """A CRIU that is killed can take the tree along, and nothing can prevent it: but 31 must say so."""
        if plan.blow.target != "criu" or complete:
            return False
        if answer is None or (answer.status, answer.report["process"]) != (31, "gone"):
            return False
        self.counts["dump: a killed CRIU took the tree along, and 31 said so"] += 1
        self._end_tree()
        return True

    def _is_doubted(self, plan: Turn, answer: Answer | None) -> bool:
        """What stood still when CRIU was killed in it may end when it goes on: 31 must say so, and name it."""
        if plan.blow.target != "criu" or answer is None or answer.status != 31:
            return False
        if "it may end when it goes on" not in answer.error["message"]:
            return False
        self.counts["dump: a killed CRIU may have harmed a stopped process, and 31 said so"] += 1
        self._end_tree()
        return True

    def _restore_turn(self, plan: Turn) -> None:
        self.counts["restores"] += 1
        options = plan.restore_options()
        answer = self._shoot(plan, "restore", self.image, *NO_SETTLE, *options)
        seen = self._look(plan, answer)
        if seen not in ("advancing", "gone"):
            what = {"dead": "dead connection", "frozen": "frozen"}.get(seen, "half-restored")
            raise Wrong(what, f"after a restore the tree is {seen}")
        require_true_restore(answer, seen)
        self.counts["restore: whole" if seen == "advancing" else "restore: nothing"] += 1
        if seen == "advancing":
            self._tree.kill()
        self._restore_undisturbed(options)

    def _restore_undisturbed(self, options: list[str]) -> None:
        """The image still restores, and what a killed run left is gone afterwards."""
        answer = gpuckpt("restore", self.image, *NO_SETTLE, *options)
        if answer.status != 0:
            raise Wrong("bad image", f"it does not restore: {answer.status} {answer.error} {answer.stderr[-2000:]}")
        if (seen := self._tree.look()) != "advancing":
            raise Wrong("bad image", f"restored from it the tree is {seen}")
        self._saved = False
        self._remove_image()
        self._require_nothing_left()

    def _close_block(self) -> None:
        """One undisturbed run at the end, whatever was before."""
        if self._saved:
            self._restore_undisturbed([])
        elif self._tree is not None:
            self._dump_undisturbed(plain=False)

    def _dump_undisturbed(self, plain: bool) -> None:
        """Whatever was before, the tree can be dumped, and what killed runs left is gone afterwards."""
        answer = gpuckpt("dump", "--tree", self._tree.root, self.image, *NO_SETTLE, *["--plain"] * plain)
        if answer.status != 0 or self._tree.look() != "gone":
            raise Wrong("left behind", f"the next dump is not possible: {answer.status} {answer.error}")
        self._saved = True
        self._require_nothing_left(dumped=True)

    def _shoot(self, plan: Turn, verb: str, *arguments: object) -> Answer | None:
        """The run and its blow; what main said, None where it was killed before it could."""
        self._last_words = None
        shot = Shot(verb, *arguments, start_new_session=True)
        length = self._length(plan, verb)
        hit = blows.strike(shot, plan, length)
        self.counts[f"{plan.blow.name}{'' if hit or plan.blow.target == 'nothing' else ' (nothing to hit)'}"] += 1
        try:
            answer = shot.answer()
        except IndexError:
            raise Wrong("left behind", "gpuckpt has not ended after two minutes") from None
        self._last_words = answer
        self._require_quiet()
        if answer is not None and answer.status < 0:
            # Killed when it had said all: the status that it could not give any more, or as a shell shows a signal.
            killed = answer.status == -signal.SIGKILL and answer.report["outcome"] == "ok"
            answer.status = 0 if killed else 128 - answer.status
        if answer is None and not died_of(shot, plan):
            raise Wrong("untrue words", f"no envelope, status {shot.main.returncode}: {stderr_of(shot)}")
        if plan.blow.target == "nothing" and (answer is None or answer.status != 0):
            raise Wrong("left behind", f"undisturbed, it fails: {answer and (answer.status, answer.error)}")
        if answer is not None:
            self.counts[f"status {answer.status}"] += 1
            if answer.status == 0:
                self._require_nothing_left(dumped=verb == "dump")
        return answer

    def _length(self, plan: Turn, verb: str) -> Length:
        kind = plan.kind if plan.kind in self.kinds else self.kinds[0]
        return self.lengths[verb, kind, plan.plain, plan.leave_running and verb == "dump"]

    def _look(self, plan: Turn, answer: Answer | None) -> str:
        """What the tree is, after the repair where the answer asks for it or nobody was left to answer."""
        seen = self._tree.look()
        asked = answer is not None and f"restore --tree {self._tree.root}" in (answer.error.get("hint") or "")
        if seen in ("advancing", "gone") or not (asked or (answer is None and plan.blow.target == "both")):
            return seen
        repaired = gpuckpt("restore", "--tree", self._tree.root)
        self.counts["repaired by restore --tree"] += 1
        if repaired.status not in (0, 21):
            raise Wrong("frozen", f"restore --tree: {repaired.status} {repaired.error}")
        return self._tree.look()

    @property
    def _partial(self) -> Path:
        return self.image.with_name(self.image.name + ".partial")

    def _require_quiet(self) -> None:
        """Owners, CRIUs and their scripts end by themselves."""
        deadline = time.monotonic() + QUIET_SECONDS
        while busy := leftovers.busy(self._tree.pids):
            if time.monotonic() > deadline:
                raise Wrong("left behind", f"still at work: {busy}")
            time.sleep(0.02)

    def _require_nothing_left(self, *, dumped: bool = False) -> None:
        """After a run that succeeded: what it and all before it left; a dump removes partial images."""
        left = [str(directory) for directory in arena.runs_of(*self._tree.pids)]
        left += [str(self._partial)] if dumped and self._partial.exists() else []
        deadline = time.monotonic() + 10
        while strange := leftovers.host_wide() - self._before:
            if time.monotonic() > deadline:  # those of other people's runs go
                left += sorted(strange)
                self._before |= strange
                break
            time.sleep(0.1)
        if left:
            raise Wrong("left behind", f"after a run that succeeded: {left}")

    def _note(self, plan: Turn, wrong: Wrong) -> None:
        directory = self.place.with_name(self.place.name + "-evidence") / str(plan.number)
        files = (self.image, self._partial, self.place / "tree")
        evidence.keep(directory, plan, wrong, self._last_words, self._tree, files)
        self.wrongs.append({"number": plan.number, "what": wrong.what, "seen": wrong.seen, "evidence": str(directory)})

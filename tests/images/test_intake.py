"""Whose turn it is to take a frame off a pages file, over real pipes."""

from __future__ import annotations

import os
import threading

import pytest

from gpuckpt.images import streaming
from gpuckpt.images.captureworker import Pages
from gpuckpt.images.intake import Intake, Source


class Taker:
    """A worker's pipe and buffer."""

    def __init__(self) -> None:
        self.source, self.target = os.pipe()
        self.buffer = b""

    def drain(self, count: int) -> None:
        while len(self.buffer) < count:
            self.buffer += os.read(self.source, count - len(self.buffer))

    def frame(self, intake: Intake) -> tuple[str, int, bytes] | None:
        taken = intake.take(self, lambda: None)
        if taken is None:
            return None
        self.drain(taken.length)
        content, self.buffer = self.buffer, b""
        return taken.source.pages.name, taken.offset, content


class Lab:
    def __init__(self) -> None:
        self.stop = streaming.Stop()
        self.ended: list[str] = []
        self.intake = Intake(self.stop, self._end)

    def _end(self, source: Source) -> None:
        os.close(source.pipe)
        self.ended.append(source.pages.name)

    def open(self, name: str) -> int:
        read, write = os.pipe()
        self.intake.add(Source(Pages(name), read, lambda: None))
        return write


@pytest.fixture
def lab():
    one = Lab()
    yield one
    one.intake.close()
    one.stop.close()


def test_frames_follow_each_other_to_the_end_of_the_file(lab):
    write = lab.open("a")
    os.write(write, b"x" * 5000)
    os.close(write)
    lab.intake.over()
    taker = Taker()
    assert taker.frame(lab.intake) == ("a", 0, b"x" * 5000)
    assert taker.frame(lab.intake) is None
    assert lab.ended == ["a"]


def test_a_frame_may_be_larger_than_the_workers_pipe(lab):
    write = lab.open("a")
    content = os.urandom(3 << 20)

    def fill() -> None:
        left = content
        while left:
            left = left[os.write(write, left) :]
        os.close(write)

    filler = threading.Thread(target=fill)
    filler.start()
    assert Taker().frame(lab.intake) == ("a", 0, content)
    filler.join()


def test_who_takes_never_waits_at_one_file_while_another_has_something(lab):
    """CRIU's one thread would wait in its write to the other for ever."""
    first, second = lab.open("a"), lab.open("b")
    os.write(first, b"1" * 10)
    os.write(second, b"2" * 20)
    taker, found = Taker(), []
    waiting = threading.Thread(target=lambda: found.extend(taker.frame(lab.intake) for _ in range(2)))
    waiting.start()
    while not found:
        waiting.join(0.01)
    name, _, _ = found[0]
    os.write(first if name == "a" else second, b"3" * 30)
    waiting.join()
    assert sorted(found) == [("a", 0, b"1" * 10), ("b", 0, b"2" * 20)]
    for one in (first, second):
        os.close(one)
    lab.intake.over()
    assert taker.frame(lab.intake) == (name, 10 if name == "a" else 20, b"3" * 30)
    assert taker.frame(lab.intake) is None
    assert sorted(lab.ended) == ["a", "b"]


def test_a_file_that_is_opened_while_somebody_waits_at_another(lab):
    first = lab.open("a")
    os.write(first, b"1")
    found = []
    waiting = threading.Thread(target=lambda: found.append(Taker().frame(lab.intake)))
    waiting.start()
    second = lab.open("b")
    os.write(second, b"2")
    waiting.join()
    assert found == [("a", 0, b"1")]
    os.close(first)
    os.close(second)


def test_stopped_everybody_leaves(lab):
    lab.open("a")
    results = []
    takers = [threading.Thread(target=lambda: results.append(Taker().frame(lab.intake))) for _ in range(3)]
    for one in takers:
        one.start()
    lab.stop.raise_()
    for one in takers:
        one.join()
    assert results == [None] * 3


def test_an_empty_file_ends_without_a_frame(lab):
    os.close(lab.open("a"))
    lab.intake.over()
    assert Taker().frame(lab.intake) is None
    assert lab.ended == ["a"]

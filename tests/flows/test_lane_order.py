"""Which lane carries what: whole parts, so that they can be hashed as they arrive; help for a lane that is far behind."""

from __future__ import annotations

import pytest

from gpuckpt.flows.lanes import _Waiting, lane_count
from gpuckpt.stores.protocol import Piece


def pieces(part: int, count: int) -> list[Piece]:
    return [Piece(part, number, 4 << 20) for number in range(count)]


def test_a_lane_carries_a_part_front_to_back():
    one, two = pieces(0, 8), pieces(1, 8)
    waiting = _Waiting([*one, *two])
    left, right = waiting.taken(), waiting.taken()
    taken = [(next(left), next(right)) for _ in range(8)]
    assert taken == list(zip(one, two, strict=True))
    assert next(left, None) is None


def test_a_lane_without_a_part_takes_from_the_end_of_another():
    waiting = _Waiting(pieces(0, 8))
    left, right = waiting.taken(), waiting.taken()
    assert (next(left).number, next(right).number, next(right).number) == (0, 7, 6)
    assert sorted(piece.number for lane in (left, right) for piece in lane) == [1, 2, 3, 4, 5]


def test_what_is_nearly_done_is_left_to_its_lane():
    waiting = _Waiting(pieces(0, 8))
    left, right = waiting.taken(), waiting.taken()
    for _ in range(6):
        next(left)
    assert next(right, None) is None
    assert [piece.number for piece in left] == [6, 7]


def test_a_part_that_is_shared_already_is_shared_to_its_end():
    """Or the last quarter of it would go over one of eight connections."""
    waiting = _Waiting(pieces(0, 8))
    lanes = [waiting.taken() for _ in range(4)]
    assert sorted(next(lane).number for lane in lanes * 2) == list(range(8))


def test_every_piece_is_taken_once_whoever_comes_first():
    waiting = _Waiting([*pieces(0, 1), *pieces(1, 13), *pieces(2, 1), *pieces(3, 5)])
    assert len(waiting) == 20
    lanes, taken = [waiting.taken() for _ in range(3)], []
    while lanes:
        for lane in list(lanes):
            piece = next(lane, None)
            if piece is None:
                lanes.remove(lane)
            else:
                taken.append((piece.part, piece.number))
    assert len(taken) == len(set(taken)) == 20
    assert len(waiting) == 0


def test_nothing_is_taken_after_the_end():
    waiting = _Waiting(pieces(0, 8))
    lane = waiting.taken()
    next(lane)
    waiting.clear()
    assert next(lane, None) is None


@pytest.mark.parametrize(
    ("cores", "seconds", "size", "used_at_once", "into_files"),
    [
        (2, 0.001, 100 << 30, 1, 2),
        (2, 0.001, 1 << 30, 1, 1),
        (3, 0.001, 100 << 30, 1, 3),
        (4, 0.001, 1 << 30, 2, 2),
        (4, 0.001, 100 << 30, 2, 4),
        (64, 0.001, 100 << 30, 4, 4),
        (64, 0.001, 300 << 20, 1, 1),
        (1, 0.001, 100 << 30, 1, 1),
        (2, 0.1, 100 << 30, 8, 8),
        (2, 0.1, 100 << 20, 3, 3),
        (2, 0.1, 1, 1, 1),
    ],
)
def test_how_many_connections(monkeypatch, cores, seconds, size, used_at_once, into_files):
    """Near by they are limited by cores, far away by their windows."""
    monkeypatch.setattr("os.sched_getaffinity", lambda _pid: set(range(cores)))
    assert lane_count(None, seconds, size, 1000) == used_at_once
    assert lane_count(None, seconds, size, 1000, into_files=True) == into_files


def test_as_many_connections_as_were_asked_for():
    assert [lane_count(wanted, 0.001, 1 << 40, 5) for wanted in (1, 3, 9)] == [1, 3, 5]

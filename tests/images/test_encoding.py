"""What is stored of a frame: compressed where that saves something, and no time spent where it does not."""

from __future__ import annotations

import random

import pytest
import zstandard

from gpuckpt.images.encoding import SAMPLE_STRIDE_BYTES, WORTH, FrameCoder
from gpuckpt.images.packindex import FRAME_BYTES

NOISE = random.Random(7).randbytes(FRAME_BYTES)


def patchwork(period: int) -> bytes:
    """A frame of which the first half of every period is noise, the second zero."""
    half = period // 2
    return b"".join(NOISE[at : at + half] + bytes(half) for at in range(0, FRAME_BYTES, period))


class Counting:
    """A compressor that remembers how much it was given."""

    def __init__(self, level: int) -> None:
        self.given: list[int] = []
        self._real = zstandard.ZstdCompressor(level=level)

    def compress(self, raw) -> bytes:
        self.given.append(len(raw))
        return self._real.compress(raw)


def counting(coder: FrameCoder, level: int) -> Counting:
    coder._compressor = Counting(level)
    return coder._compressor


def test_noise_is_not_compressed_to_find_out_that_it_does_not_shrink():
    coder = FrameCoder(-1)
    seen = counting(coder, -1)
    stored, compressed = coder.encode(memoryview(NOISE))
    assert (bytes(stored), compressed) == (NOISE, False)
    assert sum(seen.given) <= FRAME_BYTES // 32


@pytest.mark.parametrize("level", [0, 1, 3])
def test_whoever_asks_for_more_than_a_fast_level_gets_every_frame_tried(level):
    coder = FrameCoder(level)
    seen = counting(coder, level)
    assert coder.encode(memoryview(NOISE)) == (NOISE, False)
    assert seen.given == [FRAME_BYTES]


def test_a_small_frame_is_tried_whole():
    coder = FrameCoder(-1)
    seen = counting(coder, -1)
    coder.encode(memoryview(NOISE)[:SAMPLE_STRIDE_BYTES])
    assert seen.given == [SAMPLE_STRIDE_BYTES]


@pytest.mark.parametrize("shift", range(2, 10))
def test_memory_that_repeats_itself_shows_all_its_sides_to_the_sample(shift):
    """Noise and zero in turn, from 8 KiB of each to 2 MiB: every such frame compresses by half, and is compressed."""
    raw = patchwork(4096 << shift)
    stored, compressed = FrameCoder(-1).encode(memoryview(raw))
    assert compressed
    assert len(stored) < FRAME_BYTES * 0.52


def test_what_saves_too_little_is_stored_as_it_is():
    nearly = NOISE[: FRAME_BYTES - FRAME_BYTES // WORTH + 4096] + bytes(FRAME_BYTES // WORTH - 4096)
    assert FrameCoder(3).encode(memoryview(nearly))[1] is False
    assert FrameCoder(3).encode(memoryview(NOISE[: FRAME_BYTES // 2] + bytes(FRAME_BYTES // 2)))[1] is True


def test_without_a_level_nothing_is_compressed():
    raw = bytes(FRAME_BYTES)
    assert FrameCoder(None).encode(memoryview(raw)) == (raw, False)

"""From the raw bytes of a frame to its stored ones: compressed (zstd), or as they are.

Sources: the zstd frame format is RFC 8878; python-zstandard's API is that of 0.23.
"""

from __future__ import annotations

import zstandard

DEFAULT_LEVEL = -1
"""Measured on memory that compresses by half, seconds of the capture: 2 cores, 2.1 GB: 1.02 at level -1, 0.88 at none;
16 cores, 13.6 GB: 1.50 and 1.36. On a disk -1 wins: 2 cores, ext4, synced: 1.16 and 1.43."""

CHECKSUM_BYTES = 4
"""At the end of every zstd frame that we write."""

WORTH = 32
"""A frame is stored as it is unless compression saves one part in this many."""

SAMPLE_PIECES = 16
SAMPLE_PIECE_BYTES = 4096
SAMPLE_STRIDE_BYTES = 61 * 4096
"""Between two pieces: an odd number of pages, and a prime one, so that memory which repeats itself every so many pages
does not show the same side each time."""


class FrameCoder:
    """Turns raw bytes into what is stored. One for each thread.

    The fast levels (below 0) look at a sample first. Weights of a model do not shrink by them at all (float32 and
    bfloat16, normally distributed: ratio 1.00), and to find that out for each frame took 5.8 s of 18 of the processors'
    time for 17 GB. Whoever asks for more than a fast level gets every frame tried.
    """

    def __init__(self, level: int | None) -> None:
        """`level` is zstd's, None stores everything as it is."""
        self._compressor = (
            None
            if level is None
            else zstandard.ZstdCompressor(level=level, write_checksum=True, write_content_size=True)
        )
        self._samples = level is not None and level < 0

    def encode(self, raw: memoryview) -> tuple[memoryview | bytes, bool]:
        """The bytes to store, and whether they are compressed."""
        if self._compressor is None or (self._samples and not self._promises(raw)):
            return raw, False
        packed = self._compressor.compress(raw)
        if not _is_worth_it(len(packed), len(raw)):
            return raw, False
        return packed, True

    def _promises(self, raw: memoryview) -> bool:
        """Whether a sample of a large frame can be compressed."""
        if self._compressor is None or len(raw) < SAMPLE_PIECES * SAMPLE_STRIDE_BYTES:
            return True
        starts = range(0, SAMPLE_PIECES * SAMPLE_STRIDE_BYTES, SAMPLE_STRIDE_BYTES)
        sample = b"".join(raw[start : start + SAMPLE_PIECE_BYTES] for start in starts)
        return _is_worth_it(len(self._compressor.compress(sample)), len(sample))


def checksum_of(stored: memoryview | bytes, *, compressed: bool) -> bytes:
    """The Content_Checksum at the end of what FrameCoder made of a frame; empty where that is no zstd frame."""
    return bytes(stored[-CHECKSUM_BYTES:]) if compressed else b""


def _is_worth_it(packed: int, raw: int) -> bool:
    return packed < raw - raw // WORTH

"""Copies: every byte, holes as holes, whatever the two file systems can do."""

from __future__ import annotations

import contextlib
import os
import random
from pathlib import Path

import pytest

from gpuckpt.system import copying

MIB = 1 << 20
PLACES = [place for place in ("/dev/shm", "/var/tmp") if os.access(place, os.W_OK)]


@contextlib.contextmanager
def two(source: Path, target: Path):
    """Both open."""
    reading, writing = os.open(source, os.O_RDONLY), os.open(target, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    try:
        yield reading, writing
    finally:
        os.close(reading)
        os.close(writing)


def holey(path: Path, size: int, pieces: int, seed: int) -> Path:
    """Data here and there, also at an odd end."""
    rng = random.Random(seed)
    with path.open("wb") as file:
        for _ in range(pieces):
            file.seek(rng.randrange(size))
            file.write(rng.randbytes(rng.randrange(1, 100_000)))
        file.truncate(size)
    return path


@pytest.fixture(params=[(a, b) for a in PLACES for b in PLACES], ids="->".join)
def places(request, tmp_path_factory):
    """Two directories, on one file system or on two."""
    import shutil
    import tempfile

    made = [Path(tempfile.mkdtemp(dir=place)) for place in request.param]
    yield made
    for directory in made:
        shutil.rmtree(directory)


@pytest.mark.parametrize(("size", "pieces"), [(0, 0), (1, 1), (50 * MIB + 3, 0), (50 * MIB + 3, 9), (3 * MIB, 60)])
def test_a_copy_is_the_same(places, size, pieces):
    source, target = holey(places[0] / "a", size, pieces, size + pieces), places[1] / "b"
    with two(source, target) as (reading, writing):
        copying.copy_whole(reading, writing)
        assert copying.same_bytes(reading, writing, size)
    assert target.read_bytes() == source.read_bytes()
    assert target.stat().st_blocks * 512 <= source.stat().st_blocks * 512 + MIB


def test_the_end_alone(places):
    source, target = holey(places[0] / "a", 20 * MIB + 5, 12, 7), places[1] / "b"
    with two(source, target) as (reading, writing):
        copying.copy_range(reading, writing, 3 * MIB + 1, 20 * MIB + 5)
        assert copying.same_bytes(writing, reading, 17 * MIB + 4, at=3 * MIB + 1)
    assert target.read_bytes() == source.read_bytes()[3 * MIB + 1 :]


def test_one_byte_is_another(tmp_path):
    first, second = holey(tmp_path / "a", 5 * MIB, 9, 1), holey(tmp_path / "b", 5 * MIB, 9, 1)
    with second.open("r+b") as file:
        file.seek(4 * MIB + 17)
        byte = file.read(1)
        file.seek(4 * MIB + 17)
        file.write(bytes([byte[0] ^ 1]))
    with two(first, tmp_path / "x") as (one, _), two(second, tmp_path / "y") as (other, _):
        assert copying.same_bytes(one, other, 4 * MIB + 17)
        assert not copying.same_bytes(one, other, 4 * MIB + 18)
        assert not copying.same_bytes(one, other, 5 * MIB + 1)


def test_a_source_that_becomes_shorter(tmp_path):
    source = tmp_path / "a"
    source.write_bytes(b"x" * (40 * MIB))
    with two(source, tmp_path / "b") as (reading, writing), pytest.raises(OSError, match="shorter"):
        copying.copy_range(reading, writing, 0, 40 * MIB, going_on=lambda: os.truncate(source, 10))


def test_a_full_disk(tmp_path):
    with (
        two(holey(tmp_path / "a", MIB, 20, 3), Path("/dev/full")) as (reading, writing),
        pytest.raises(OSError) as full,
    ):
        copying.copy_range(reading, writing, 0, MIB)
    assert "space" in str(full.value)

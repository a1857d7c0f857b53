"""Packs that are hashed as they arrive: what counts as compared, and what is read all the same."""

from __future__ import annotations

import os

import pytest

from gpuckpt.stores.landing import DirectoryArrival
from gpuckpt.stores.landingwriter import COMPARED, compared_packs
from gpuckpt.stores.local import DirectoryStore
from gpuckpt.stores.protocol import pieces_of
from tests.small_images import make_image


def quiet(_done, _total):
    """A ticker."""


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    offer = DirectoryStore().offer(str(make_image(tmp_path_factory.mktemp("images") / "one", 18, packs=2)))
    yield offer
    offer.close()


@pytest.fixture
def arrival(source, tmp_path):
    tmp_path.chmod(0o700)
    arriving = DirectoryArrival(tmp_path / "one", source.raw_manifest)
    yield arriving
    arriving.close()


def all_pieces(source):
    return [piece for index, part in enumerate(source.manifest.parts) for piece in pieces_of(index, part)]


def carry(source, arrival, pieces, change=lambda _piece, content: content):
    reader, writer = source.open_reader(), arrival.open_writer()
    for piece, content in reader.stream(iter(pieces)):
        writer.send(piece, change(piece, content))
    writer.close()
    reader.close()


def partial(arrival):
    return arrival._partial.path


def compared(source, arrival):
    return compared_packs(partial(arrival), source.manifest.parts)


def packs(source):
    return {part.path for part in source.manifest.parts if part.path.endswith(".zst")}


def test_packs_that_came_front_to_back_need_no_second_look(source, arrival):
    carry(source, arrival, all_pieces(source))
    assert compared(source, arrival) == packs(source)
    assert list(arrival.verify(quiet)) == []


def test_a_pack_that_came_in_another_order_is_read(source, arrival):
    carry(source, arrival, list(reversed(all_pieces(source))))
    assert compared(source, arrival) == set()
    assert list(arrival.verify(quiet)) == []


def test_a_pack_that_came_over_two_streams_is_read(source, arrival):
    pieces = all_pieces(source)
    carry(source, arrival, pieces[::2])
    carry(source, arrival, pieces[1::2])
    assert compared(source, arrival) == set()
    assert list(arrival.verify(quiet)) == []


def test_a_pack_that_came_wrong_is_never_taken_for_compared(source, arrival):
    def flipped(piece, content):
        if source.manifest.parts[piece.part].path in packs(source) and piece.number == 1:
            return memoryview(bytes([content[0] ^ 1]) + bytes(content[1:]))
        return content

    carry(source, arrival, all_pieces(source), flipped)
    assert compared(source, arrival) == set()
    assert {source.manifest.parts[index].path for index in arrival.verify(quiet)} == packs(source)


@pytest.mark.parametrize("what", ["written to", "exchanged", "shorter"])
def test_what_was_touched_since_is_read(source, arrival, what):
    carry(source, arrival, all_pieces(source))
    hurt = min(packs(source))
    place = partial(arrival) / hurt
    content = place.read_bytes()
    if what == "exchanged":
        place.unlink()
    place.write_bytes(content[:-1] + (b"" if what == "shorter" else bytes([content[-1] ^ 1])))
    [bad] = arrival.verify(quiet)
    assert source.manifest.parts[bad].path == hurt


def test_a_later_run_reads_what_an_earlier_one_compared(source, arrival, tmp_path):
    """After a crash of the host in between the disk may hold something else."""
    carry(source, arrival, all_pieces(source))
    assert (partial(arrival) / COMPARED).stat().st_size
    hurt = min(packs(source))
    place = partial(arrival) / hurt
    before = place.stat()
    arrival.close()
    again = DirectoryArrival(tmp_path / "one", source.raw_manifest)
    try:
        assert compared(source, again) == set()
        assert os.stat(place).st_ino == before.st_ino
        assert list(again.verify(quiet)) == []
    finally:
        again.close()


def test_nothing_of_it_is_in_what_is_published(source, arrival, tmp_path):
    carry(source, arrival, all_pieces(source))
    arrival.verify(quiet)
    arrival.publish()
    assert not (tmp_path / "one" / COMPARED).exists()

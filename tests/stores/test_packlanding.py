"""Packs that arrive before their image: what is damaged, out of order or without leave gets no name, and nothing stays."""

from __future__ import annotations

import os

import blake3
import pytest

from gpuckpt.flows.farpacks import FarPacks
from gpuckpt.model.errors import GpuckptError, Refused, TransferFailed
from gpuckpt.stores.local import DirectoryStore
from gpuckpt.stores.ssh import SshStore
from gpuckpt.system.links import LinkLost
from tests.lines import Line
from tests.small_images import make_image


@pytest.fixture
def line():
    made = Line()
    yield made
    made.ended()


@pytest.fixture
def store(line):
    made = SshStore(line)
    yield made
    made.close()


@pytest.fixture
def place(tmp_path):
    (tmp_path / "there").mkdir(mode=0o700)
    return tmp_path / "there" / "image"


def partial(place):
    return place.with_name("image.partial")


def test_packs_that_came_before_the_manifest_are_not_sent_again(store, place, tmp_path):
    image = make_image(tmp_path / "one", 9, packs=1)
    offer = DirectoryStore().offer(str(image))
    pack = next((image / "packs").glob("*.zst"))
    far = FarPacks(store, str(place), 2)
    one, other = far.open(0), far.open(1)
    content = pack.read_bytes()
    for at in range(0, len(content), 1 << 20):
        assert one.append(content[at : at + (1 << 20)]) == at
    assert one.finish().file == pack.name
    assert other.finish() is None
    assert far.sent_bytes == len(content)

    arrival = store.receive(str(place), offer.raw_manifest)
    held = [offer.manifest.parts[index].path for index in arrival.held()]
    assert held == [f"packs/{pack.name}"]
    arrival.close()
    assert not partial(place).exists(), "what nobody will go on with is removed"
    offer.close()


def test_without_a_manifest_nothing_stays(line, place):
    store = SshStore(line)
    far = FarPacks(store, str(place), 1)
    far.open(0).append(b"x" * 1000)
    assert partial(place).exists()
    far.cut()
    store.close()
    line.ended()
    assert not partial(place).exists()


@pytest.mark.parametrize(
    ("question", "content"),
    [
        ({"do": "pack-write", "at": 7}, b"too far"),
        ({"do": "pack-write", "at": -1}, b"before the beginning"),
        ({"do": "pack-finish", "b3": "0" * 64, "size": 5}, b""),
        ({"do": "pack-finish", "b3": blake3.blake3(b"begun").hexdigest(), "size": 6}, b""),
        ({"do": "pack-finish", "b3": "../../" + "0" * 58, "size": 5}, b""),
        ({"do": "pack-finish"}, b""),
    ],
)
def test_what_does_not_fit_gets_no_name(store, place, question, content):
    token = store.question({"do": "packs", "path": str(place)}).header["token"]
    peer = store.another()
    peer.ask({"do": "pack-join", "path": str(place), "token": token})
    peer.ask({"do": "pack-write", "at": 0}, b"begun")
    with pytest.raises(GpuckptError):
        peer.ask(question, content)
    assert not list((partial(place) / "packs").glob("*.zst"))
    peer.close()


def test_only_who_knows_the_token_may_send_packs(store, place):
    store.question({"do": "packs", "path": str(place)})
    for token in ("", "0" * 32):
        peer = store.another()
        with pytest.raises(Refused):
            peer.ask({"do": "pack-join", "path": str(place), "token": token})
        peer.close()
    peer = store.another()
    with pytest.raises(Refused):
        peer.ask({"do": "pack-write", "at": 0}, b"x")
    peer.close()


def test_a_place_that_is_taken_or_under_work_is_refused(store, place):
    place.mkdir()
    with pytest.raises(Refused):
        store.question({"do": "packs", "path": str(place)})
    place.rmdir()
    store.question({"do": "packs", "path": str(place)})
    peer = store.another()
    with pytest.raises(GpuckptError, match="right now"):
        peer.ask({"do": "packs", "path": str(place)})
    peer.close()


def test_a_connection_that_is_cut_fails_who_sends(store, place):
    far = FarPacks(store, str(place), 1)
    far.cut()
    with pytest.raises((TransferFailed, LinkLost)):
        for _ in range(100):
            far.open(0).append(os.urandom(1 << 20))

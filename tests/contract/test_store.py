"""What every store keeps to: this host's directories, a host with gpuckpt, a bare SFTP host. All real."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from gpuckpt.flows.lanes import Lanes, missing_pieces
from gpuckpt.model import manifest as manifests
from gpuckpt.model.errors import Busy, ImageCorrupt, NotFound, Refused
from gpuckpt.stores.journal import held_bytes
from gpuckpt.stores.local import DirectoryStore
from gpuckpt.stores.protocol import PIECE_BYTES, pieces_of
from gpuckpt.stores.sftp import SftpStore
from gpuckpt.stores.ssh import SshStore
from gpuckpt.system.ssh import Account, Caller
from tests.small_images import content_of, make_image
from tests.sshd import REMOTE_COMMAND

KINDS = ("directory", "gpuckpt", "sftp")


def caller(sshd, host):
    return Caller(Account(host, config=sshd.config))


def connect(kind, sshd):
    if kind == "directory":
        return DirectoryStore()
    if kind == "gpuckpt":
        return SshStore(caller(sshd, "far"), REMOTE_COMMAND)
    return SftpStore(caller(sshd, "bare"))


@pytest.fixture(params=KINDS, scope="module")
def store(request, sshd):
    """One connection for all tests: what one of them leaves behind would meet the next."""
    opened = connect(request.param, sshd)
    opened.kind = request.param
    yield opened
    opened.close()


@pytest.fixture
def new_store(store, sshd):
    """Opens another connection to the same place."""
    opened = []

    def make():
        opened.append(connect(store.kind, sshd))
        return opened[-1]

    yield make
    for one in opened:
        one.close()


@pytest.fixture(scope="module")
def images(tmp_path_factory) -> Path:
    """`one`, and `next`, which shares the packs of `one`."""
    root = tmp_path_factory.mktemp("images")
    make_image(root / "one", 9.3)
    make_image(root / "next", 4, seed=2, packs=1, base=root / "one")
    return root


@pytest.fixture
def source(images):
    offer = DirectoryStore().offer(str(images / "one"))
    yield offer
    offer.close()


@pytest.fixture(scope="module")
def place(store, tmp_path_factory) -> Path:
    """One directory for one connection: a far side that runs as root keeps to the first that it is asked for."""
    return tmp_path_factory.mktemp("there")


@pytest.fixture
def there(place) -> Path:
    place.chmod(0o700)
    yield place
    for left in place.iterdir():
        shutil.rmtree(left) if left.is_dir() and not left.is_symlink() else left.unlink()


def quiet(_done, _total):
    """A ticker."""


def carry(offer, arrival, pieces, lanes=1):
    with Lanes(pieces, offer.open_reader, arrival.open_writer) as under_way:
        under_way.start(lanes)
        while not under_way.wait(0.05):
            pass


def send(offer, store, target, lanes=1) -> str:
    arrival = store.receive(str(target), offer.raw_manifest, offer)
    try:
        missing = missing_pieces(offer.manifest.parts, arrival.held())
        if missing:
            carry(offer, arrival, missing, lanes)
        assert list(arrival.verify(quiet)) == []
        return arrival.publish()
    finally:
        arrival.close()


def test_what_was_sent_is_there_and_can_be_read_back(store, source, images, there, tmp_path):
    assert send(source, store, there / "one", lanes=3)
    assert content_of(there / "one") == content_of(images / "one")
    modes = {path.stat().st_mode & 0o777 for path in (there / "one").rglob("*")}
    assert modes == {0o700, 0o600}
    assert [path.name for path in there.iterdir()] == ["one"]

    offer = store.offer(str(there / "one"))
    assert offer.raw_manifest == source.raw_manifest
    send(offer, DirectoryStore(), tmp_path / "back")
    assert content_of(tmp_path / "back") == content_of(images / "one")
    assert offer.verify(quiet)
    offer.close()


def test_what_had_arrived_is_not_missing(store, source, images, there):
    parts = source.manifest.parts
    largest = max(range(len(parts)), key=lambda index: parts[index].size)
    some = [piece for piece in pieces_of(largest, parts[largest]) if piece.number % 2 == 0]
    arrival = store.receive(str(there / "one"), source.raw_manifest, source)
    carry(source, arrival, some)
    arrival.close()
    assert not (there / "one").exists()

    arrival = store.receive(str(there / "one"), source.raw_manifest, source)
    held = arrival.held()
    assert list(held) == [largest]
    assert held_bytes(parts, held) == sum(piece.size for piece in some) >= PIECE_BYTES
    arrival.close()
    send(source, store, there / "one")
    assert content_of(there / "one") == content_of(images / "one")


@pytest.mark.parametrize("damage", ["flipped", "cut", "longer", "gone"])
def test_a_part_that_does_not_fit_is_named_dropped_and_can_be_sent_again(store, source, images, there, damage):
    parts = source.manifest.parts
    arrival = store.receive(str(there / "one"), source.raw_manifest, source)
    carry(source, arrival, missing_pieces(parts, {}))
    hurt = next(index for index, part in enumerate(parts) if part.size > PIECE_BYTES)
    place = there / "one.partial" / parts[hurt].path
    content = place.read_bytes()
    if damage == "gone":
        place.unlink()
    else:
        flipped = content[:-1] + bytes([content[-1] ^ 1])
        place.write_bytes({"flipped": flipped, "cut": content[:-1], "longer": content + b"x"}[damage])
    assert list(arrival.verify(quiet)) == [hurt]
    carry(source, arrival, list(pieces_of(hurt, parts[hurt])))
    assert list(arrival.verify(quiet)) == []
    arrival.publish()
    arrival.close()
    assert content_of(there / "one") == content_of(images / "one")


def test_packs_of_an_older_image_beside_it_are_linked(store, source, images, there):
    send(source, store, there / "one")
    offer = DirectoryStore().offer(str(images / "next"))
    arrival = store.receive(str(there / "next"), offer.raw_manifest, offer)
    held = held_bytes(offer.manifest.parts, arrival.held())
    arrival.close()
    shared = list((images / "one" / "packs").glob("*.zst"))
    assert held == sum(path.stat().st_size for path in shared)
    send(offer, store, there / "next")
    offer.close()
    assert content_of(there / "next") == content_of(images / "next")
    for path in shared:
        assert os.path.samefile(there / "one" / "packs" / path.name, there / "next" / "packs" / path.name)


def test_something_else_beside_it_that_has_the_name_of_files_sent_before_is_no_obstacle(store, source, images, there):
    (there / "one-files").mkdir(mode=0o700, parents=True)
    (there / "one-files" / "manifest.json").write_text('{"name": "my app"}')
    assert send(source, store, there / "one")
    assert content_of(there / "one") == content_of(images / "one")


def test_a_damaged_pack_of_an_older_image_is_not_taken_over(store, source, images, there):
    send(source, store, there / "one")
    pack = next((there / "one" / "packs").glob("*.zst"))
    pack.write_bytes(bytes(pack.stat().st_size))
    offer = DirectoryStore().offer(str(images / "next"))
    arrival = store.receive(str(there / "next"), offer.raw_manifest, offer)
    carry(offer, arrival, missing_pieces(offer.manifest.parts, arrival.held()))
    bad = list(arrival.verify(quiet))
    assert [offer.manifest.parts[index].path for index in bad] == [f"packs/{pack.name}"]
    carry(offer, arrival, [piece for index in bad for piece in pieces_of(index, offer.manifest.parts[index])])
    assert list(arrival.verify(quiet)) == []
    arrival.publish()
    arrival.close()
    offer.close()
    assert content_of(there / "next") == content_of(images / "next")
    assert pack.read_bytes() == bytes(pack.stat().st_size), "a published image was written to"


def test_the_same_image_again_is_already_there(store, source, there):
    send(source, store, there / "one")
    arrival = store.receive(str(there / "one"), source.raw_manifest, source)
    assert arrival.already
    assert list(arrival.verify(quiet)) == []
    assert arrival.publish()
    arrival.close()


def test_the_same_image_there_but_damaged_is_said(store, source, there):
    send(source, store, there / "one")
    pack = next((there / "one" / "packs").glob("*.zst"))
    pack.write_bytes(bytes(pack.stat().st_size))
    arrival = store.receive(str(there / "one"), source.raw_manifest, source)
    with pytest.raises(ImageCorrupt, match=pack.name):
        arrival.verify(quiet)
    arrival.close()
    offer = store.offer(str(there / "one"))
    with pytest.raises(ImageCorrupt, match=pack.name):
        offer.verify(quiet)
    offer.close()


@pytest.mark.parametrize("what", ["another image", "a file", "an empty directory", "a link"])
def test_what_stands_there_is_never_replaced(store, source, images, there, what):
    target = there / "one"
    if what == "another image":
        make_image(target, 0.1, seed=9)
    elif what == "a file":
        target.write_text("precious")
    elif what == "a link":
        target.symlink_to("/nowhere")
    else:
        target.mkdir()
    with pytest.raises(Refused, match="exists already"):
        store.receive(str(target), source.raw_manifest, source)
    assert sorted(path.name for path in there.iterdir()) == ["one"]


def test_only_one_at_a_time(store, new_store, source, there):
    arrival = store.receive(str(there / "one"), source.raw_manifest, source)
    with pytest.raises(Busy, match="one"):
        new_store().receive(str(there / "one"), source.raw_manifest, source)
    arrival.close()


def test_a_killed_makers_leftover_is_gone_on_with_whatever_is_in_it(store, source, images, there):
    partial = there / "one.partial"
    (partial / "criu").mkdir(parents=True)
    partial.chmod(0o700)
    (partial / "criu" / "strange.img").write_text("x")
    (partial / "link").symlink_to("/etc")
    send(source, store, there / "one")
    assert content_of(there / "one") == content_of(images / "one")
    assert Path("/etc").is_dir()


def test_a_directory_that_others_can_write_to_is_refused(store, source, there):
    there.chmod(0o777)
    with pytest.raises(Refused, match=r"write|exchange"):
        store.receive(str(there / "one"), source.raw_manifest, source)
    assert not list(there.iterdir())


def test_a_directory_is_made_but_not_its_parents(new_store, source, images, there):
    store = new_store()
    send(source, store, there / "new" / "one")
    assert content_of(there / "new" / "one") == content_of(images / "one")
    with pytest.raises(NotFound):
        store.receive(str(there / "a" / "b" / "one"), source.raw_manifest, source)


def test_no_image(store, there):
    with pytest.raises(NotFound):
        store.offer(str(there / "nothing"))
    (there / "empty").mkdir(mode=0o700)
    with pytest.raises(ImageCorrupt, match=manifests.NAME):
        store.offer(str(there / "empty"))


def test_a_partial_is_no_image(store, source, there):
    make_image(there / "one.partial", 0.1)
    with pytest.raises(ImageCorrupt, match="no complete image"):
        store.offer(str(there / "one.partial"))


def test_a_signature_travels_and_is_judged_before_the_manifest_is_parsed(store, there, tmp_path):
    image, seen = make_image(tmp_path / "signed", 1), []
    (image / manifests.SIGNATURE).write_bytes(b"-----BEGIN SSH SIGNATURE-----\nabc\n")
    offer = DirectoryStore().offer(str(image))
    send(offer, store, there / "signed")
    offer.close()
    copy = store.offer(f"{there}/signed", lambda raw, signature: seen.append((raw, signature)))
    copy.close()
    assert seen == [(offer.raw_manifest, b"-----BEGIN SSH SIGNATURE-----\nabc\n")]
    (there / "signed" / manifests.NAME).write_bytes(b"no manifest at all")

    def refuse(raw, signature):
        raise Refused(raw.decode())

    with pytest.raises((Refused, ImageCorrupt)) as why:
        store.offer(f"{there}/signed", refuse)
    assert "no manifest" in why.value.message or store.kind == "gpuckpt"

"""Parts compared on a bare SFTP host while others are still on their way there, through a real sshd."""

from __future__ import annotations

import shutil
import time

import pytest

from gpuckpt.flows.lanes import Lanes, missing_pieces
from gpuckpt.model.errors import ImageCorrupt
from gpuckpt.stores import farsums, sftparrival, sftpfollowing
from gpuckpt.stores.local import DirectoryStore
from gpuckpt.stores.protocol import pieces_of
from gpuckpt.stores.sftp import SftpStore
from gpuckpt.stores.sftpcheck import READ_BACK, Comparison
from gpuckpt.stores.sftpfollowing import Following
from gpuckpt.stores.ssh import ONLY_SFTP
from gpuckpt.system.ssh import Account, Caller
from tests.harness import wait_for
from tests.small_images import content_of, make_image

HOSTS = {"far": "", "bare": ONLY_SFTP}


@pytest.fixture(params=HOSTS)
def store(request, sshd, monkeypatch):
    """With a shell and no gpuckpt, or with nothing but SFTP; everything is worth to be followed."""
    monkeypatch.setattr(sftparrival, "WORTH_FOLLOWING", 1)
    monkeypatch.setattr(sftpfollowing, "WORTH_A_QUESTION", 1)
    opened = SftpStore(Caller(Account(request.param, config=sshd.config)), HOSTS[request.param])
    yield opened
    opened.close()


@pytest.fixture
def offer(tmp_path):
    opened = DirectoryStore().offer(str(make_image(tmp_path / "image", 40)))
    yield opened
    opened.close()


@pytest.fixture(params=["there", "a name that is not plain"])
def there(tmp_path, offer, request):
    """A copy of the image; one pack is damaged."""
    shutil.copytree(offer.path, tmp_path / request.param / "image")
    damaged = tmp_path / request.param / "image" / offer.manifest.parts[last_pack(offer)].path
    with damaged.open("r+b") as file:
        file.seek(-1, 2)
        byte = file.read(1)
        file.seek(-1, 2)
        file.write(bytes([byte[0] ^ 1]))
    return tmp_path / request.param / "image"


@pytest.fixture
def following(store, offer, there):
    begun = Following(store, bytes(there), offer.manifest.parts, {}, offer)
    yield begun
    begun.close()


def last_pack(offer) -> int:
    return max(index for index, part in enumerate(offer.manifest.parts) if part.path.endswith(".zst"))


def pieces(offer):
    return [piece for index, part in enumerate(offer.manifest.parts) for piece in pieces_of(index, part)]


def quiet(_done, _total):
    """A ticker."""


def all_taken(following, offer) -> bool:
    return following._taken == len(offer.manifest.parts)


def damaged_only(following, store, offer, there) -> bool:
    parts = offer.manifest.parts
    bad, _ = Comparison(store, bytes(there), parts, quiet).bad_parts(offer, following)
    return bad == [last_pack(offer)]


def test_a_damaged_part_is_not_among_those_that_fit(following, store, offer, there):
    for piece in pieces(offer):
        following.arrived(piece)
    wait_for(lambda: all_taken(following, offer), "all parts are looked at")
    assert following.take_no_more() == set(range(len(offer.manifest.parts)))
    fitting, how = following.finish(quiet)
    assert fitting == set(range(len(offer.manifest.parts))) - {last_pack(offer)}
    assert how == READ_BACK if store.where == "bare" else "there" in how
    assert damaged_only(following, store, offer, there)


def test_a_part_of_which_a_piece_has_not_come_is_not_among_those_that_fit(following, store, offer, there):
    first = next(index for index, part in enumerate(offer.manifest.parts) if part.path.endswith(".zst"))
    for piece in pieces(offer):
        if (piece.part, piece.number) != (first, 1):
            following.arrived(piece)
    following.take_no_more()
    fitting, _ = following.finish(quiet)
    assert first not in fitting
    assert damaged_only(following, store, offer, there)


def test_a_part_that_is_damaged_on_both_sides_is_not_among_those_that_fit(store, offer, there):
    """What is compared with is what the manifest says, not what the file here has become."""
    parts, source = offer.manifest.parts, DirectoryStore().offer(str(there))
    following = Following(store, bytes(there), parts, {}, source)
    for piece in pieces(offer):
        following.arrived(piece)
    wait_for(lambda: all_taken(following, offer), "all parts are looked at")
    following.take_no_more()
    assert last_pack(offer) not in following.finish(quiet)[0]
    for follows in (following, None):
        compared = Comparison(store, bytes(there), parts, quiet)
        if store.where == "bare":
            assert compared.bad_parts(source, follows)[0] == [last_pack(offer)]
            continue
        with pytest.raises(ImageCorrupt, match="damaged here"):
            compared.bad_parts(source, follows)
    following.close()
    source.close()


def test_a_host_that_takes_no_further_connection_is_asked_again_later(store, offer, there, tmp_path):
    before = set(store.without_programs)
    (tmp_path / "config").write_text("Host *\n HostName 127.0.0.1\n Port 1\n")
    store.caller = Caller(Account(store.where, config=tmp_path / "config"))
    bad, how = Comparison(store, bytes(there), offer.manifest.parts, quiet).bad_parts(offer)
    assert (bad, how) == ([last_pack(offer)], READ_BACK)
    assert store.without_programs == before


def test_pieces_come_in_any_order(following, store, offer, there):
    for piece in reversed(pieces(offer)):
        following.arrived(piece)
    wait_for(lambda: all_taken(following, offer), "all parts are looked at")
    following.take_no_more()
    fitting, _ = following.finish(quiet)
    assert len(fitting) == len(offer.manifest.parts) - 1


def test_what_it_cannot_compare_is_compared_afterwards(following, store, offer, there, monkeypatch):
    """Its connection breaks, as often as it is made."""
    real = store.another

    def broken():
        session = real()
        session.cut()
        return session

    monkeypatch.setattr(store, "another", broken)
    for piece in pieces(offer):
        following.arrived(piece)
    following.take_no_more()
    following.finish(quiet)
    monkeypatch.setattr(store, "another", real)
    assert damaged_only(following, store, offer, there)


def test_it_ends_while_it_waits_for_a_piece(following, store, offer):
    following.arrived(pieces(offer)[0])
    wait_for(lambda: following._cut is not None or following._store.where == "far", "it has its connection")
    begun = time.monotonic()
    following.close()
    assert following._ended.is_set()
    assert time.monotonic() - begun < sftpfollowing.END_SECONDS


@pytest.mark.parametrize("lanes", [1, 2])
def test_what_has_changed_there_since_is_sent_again(store, offer, tmp_path, lanes):
    target = tmp_path / "arrived" / "image"
    target.parent.mkdir(mode=0o700)
    arrival = store.receive(str(target), offer.raw_manifest, offer)
    damaged = offer.manifest.parts[last_pack(offer)]

    def send(wanted):
        with Lanes(wanted, offer.open_reader, arrival.open_writer) as under_way:
            under_way.start(lanes)
            wait_for(lambda: under_way.wait(0.05), "all has arrived")

    try:
        missing = missing_pieces(offer.manifest.parts, {})
        # What is said to have arrived is not what was sent.
        place = target.with_name("image.partial") / damaged.path
        send([piece for piece in missing if piece.part != last_pack(offer)])
        place.write_bytes(bytes(damaged.size - (4 << 20)))
        send([piece for piece in missing if piece.part == last_pack(offer)][-1:])
        assert list(arrival.verify(quiet)) == [last_pack(offer)]
        send([piece for piece in missing if piece.part == last_pack(offer)])
        assert list(arrival.verify(quiet)) == []
        arrival.publish()
    finally:
        arrival.close()
    assert content_of(target) == content_of(tmp_path / "image")


def test_a_program_that_does_not_end_is_not_waited_for(sshd, offer, tmp_path, monkeypatch):
    """What it was to compare is not among what fits."""
    shutil.copytree(offer.path, tmp_path / "there")
    monkeypatch.setattr(farsums, "RANGES", "echo sha256sum; exec sleep 100")
    store = SftpStore(Caller(Account("far", config=sshd.config), None, 1.0))
    begun = Following(store, bytes(tmp_path / "there"), offer.manifest.parts, {}, offer)
    try:
        for piece in pieces(offer):
            begun.arrived(piece)
        wait_for(begun._ended.is_set, "it gives up", 30)
        assert begun.finish(quiet)[0] == set()
    finally:
        begun.close()
        store.close()


@pytest.mark.parametrize(
    "says", ["sha256sum; yes 0000", "sha256sum; yes ''", "sha256sum; head -c 99999 /dev/zero", "x", ""]
)
def test_a_shell_that_says_something_else(sshd, offer, tmp_path, monkeypatch, says):
    shutil.copytree(offer.path, tmp_path / "there")
    monkeypatch.setattr(farsums, "RANGES", f"echo {says}")
    store = SftpStore(Caller(Account("far", config=sshd.config), None, 2.0))
    parts = offer.manifest.parts
    begun = Following(store, bytes(tmp_path / "there"), parts, {}, offer)
    try:
        for piece in pieces(offer):
            begun.arrived(piece)
        assert Comparison(store, bytes(tmp_path / "there"), parts, quiet).bad_parts(offer, begun)[0] == []
        assert begun.finish(quiet)[0] == set()
    finally:
        begun.close()
        store.close()

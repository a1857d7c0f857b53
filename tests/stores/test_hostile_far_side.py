"""A far side that lies: nothing it says is believed beyond what it may decide, nothing of it leaves its place."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from gpuckpt.flows.lanes import Lanes, missing_pieces
from gpuckpt.model import manifest as manifests
from gpuckpt.model.errors import GpuckptError, ImageCorrupt, MachineLacks, TransferFailed
from gpuckpt.stores import frames
from gpuckpt.stores.local import DirectoryStore
from gpuckpt.stores.protocol import PIECE_BYTES
from gpuckpt.stores.serving import Server
from gpuckpt.stores.ssh import NoGpuckpt, SshStore
from gpuckpt.system.links import LinkLost
from tests.lines import Line, bytes_of
from tests.small_images import make_image


@pytest.fixture(scope="module")
def image(tmp_path_factory):
    return make_image(tmp_path_factory.mktemp("images") / "one", 9, packs=1)


class Liar(Server):
    """A real server whose answers to one question are changed on their way."""

    def __init__(self, link, question, change):
        super().__init__(link)
        self._question, self._change = question, change

    def _answer(self, frame):
        header, payload = super()._answer(frame)
        if frame.header.get("do") != self._question:
            return header, payload
        return self._change(header, bytes_of(payload))


def liar(question, change):
    return Line(serve=lambda link: Liar(link, question, change).run())


def pulled(line, image, target):
    store = SshStore(line)
    try:
        offer = store.offer(str(image))
        arrival = DirectoryStore().receive(str(target), offer.raw_manifest)
        try:
            pieces = missing_pieces(offer.manifest.parts, arrival.held())
            with Lanes(pieces, offer.open_reader, arrival.open_writer) as lanes:
                lanes.start(1)
                while not lanes.wait(1):
                    pass
            bad = list(arrival.verify(lambda _done, _total: None))
            if not bad:
                arrival.publish()
            return bad
        finally:
            arrival.close()
    finally:
        store.close()
        line.ended()


def flipped(header, payload):
    return header, payload[:-1] + bytes([payload[-1] ^ 1]) if payload else payload


def longer(header, payload):
    return header, payload + b"x"


def shorter(header, payload):
    return header, payload[:-1]


def test_pieces_with_a_bit_flipped_are_found_at_the_end(image, tmp_path):
    """ssh protects what is on its way; what was wrong before is wrong where it arrives."""
    tmp_path.chmod(0o700)
    parts = manifests.decode((image / manifests.NAME).read_bytes(), "x").parts
    bad = pulled(liar("read", flipped), image, tmp_path / "one")
    assert bad == [index for index, part in enumerate(parts) if part.size]
    assert not (tmp_path / "one").exists()


@pytest.mark.parametrize("change", [longer, shorter])
def test_a_piece_that_is_not_what_was_asked_for(image, tmp_path, change):
    tmp_path.chmod(0o700)
    with pytest.raises(GpuckptError) as failure:
        pulled(liar("read", change), image, tmp_path / "one")
    assert failure.value.status == 50
    assert not (tmp_path / "one").exists()


def rewritten(image, **changes):
    """The image's manifest with other parts, its own digest right."""
    manifest = manifests.decode((image / manifests.NAME).read_bytes(), "x")
    parts = [replace(manifest.parts[0], **changes), *manifest.parts[1:]]
    return manifests.encode(replace(manifest, parts=tuple(parts)))


@pytest.mark.parametrize(
    "changes",
    [
        {"path": "../escaped"},
        {"path": "/etc/escaped"},
        {"path": "criu/../../escaped"},
        {"path": "criu//x"},
        {"path": "manifest.json"},
        {"path": "protected.json"},
        {"path": "journal"},
        {"path": "token"},
        {"path": "incoming"},
        {"path": "token.new/x"},
        {"blake3": "zz"},
        {"blake3": "00"},
        {"size": -1},
        {"size": 1 << 62},
    ],
    ids=str,
)
def test_a_manifest_with_tricks_in_it(image, tmp_path, changes):
    tmp_path.chmod(0o700)
    evil = rewritten(image, **changes)
    with pytest.raises(ImageCorrupt):
        pulled(liar("open", lambda header, _payload: (header, evil)), image, tmp_path / "one")
    assert not list(tmp_path.iterdir())
    # The same on its way to a far side.
    line = Line()
    store = SshStore(line)
    with pytest.raises(ImageCorrupt):
        store.question({"do": "begin", "path": str(tmp_path / "one")}, evil)
    store.close()
    line.ended()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("cut", [0, 1, -2])
def test_a_manifest_that_is_cut(image, tmp_path, cut):
    with pytest.raises(ImageCorrupt):
        pulled(liar("open", lambda header, payload: (header, payload[:cut])), image, tmp_path / "one")


@pytest.mark.parametrize(
    "held",
    [
        {"0": [[0, 99]]},
        {"99": [[0, 1]]},
        {"-1": [[0, 1]]},
        {"x": [[0, 1]]},
        {"0": [[1, 0]]},
        {"0": [[0, 1], [0, 1]]},
        {"0": [["a", "b"]]},
        {"0": [0]},
        [1],
        None,
        "all",
    ],
    ids=str,
)
def test_resume_points_that_cannot_be(image, tmp_path, held):
    tmp_path.chmod(0o700)
    line = liar("begin", lambda header, _payload: ({**header, "held": held}, b""))
    store = SshStore(line)
    with pytest.raises(TransferFailed, match="cannot be"):
        store.receive(str(tmp_path / "one"), (image / manifests.NAME).read_bytes())
    store.close()
    line.ended()


def greeting(header):
    def serve(link):
        link.send(frames.MARK)
        frames.send(link, header)
        frames.receive(link, frames.Buffer())

    return serve


def test_another_protocol_is_refused_in_words():
    line = Line(serve=greeting({"gpuckpt": "9.9", "protocol": [7, 9]}))
    with pytest.raises(MachineLacks, match=r"gpuckpt 9.9 on far speaks another protocol"):
        SshStore(line)
    line.ended()


@pytest.mark.parametrize("version", [None, 1, [1], ["1", "2"], [1, 2, 3]], ids=str)
def test_a_hello_without_sense(version):
    line = Line(serve=greeting({"protocol": version}))
    with pytest.raises(NoGpuckpt, match="range of versions"):
        SshStore(line)
    line.ended()


def test_endless_text_instead_of_a_hello():
    def serve(link):
        while True:
            link.send(b"x" * 4096)

    line = Line(serve=serve)
    with pytest.raises(NoGpuckpt, match="64 KiB"):
        SshStore(line)
    line.ended()


@pytest.mark.parametrize(
    "answer",
    [
        b"gpck\xff\xff\xff\xff\0\0\0\0",
        b"gpck\0\0\0\x02\xff\xff\xff\xff{}",
        b"what" + bytes(8),
        b"gpck\0\0\0\x02\0\0\0\0[]",
    ],
)
def test_frames_that_are_none(image, answer):
    def serve(link):
        greeting({"gpuckpt": "1", "protocol": [1, 1]})(link)
        frames.receive(link, frames.Buffer())
        link.send(answer, bytes(100))

    line = Line(serve=serve)
    store = SshStore(line)
    with pytest.raises(TransferFailed, match="protocol"):
        store.offer(str(image))
    store.close()
    line.ended()


def test_failures_it_tells_of_stay_text():
    evil = {"error": {"code": "internal", "message": "\x1b[2J" + "x" * 5000, "hint": ["a"]}}
    line = liar("ping", lambda _header, _payload: (evil, b""))
    store = SshStore(line)
    with pytest.raises(TransferFailed) as failure:
        store.keep_alive()
    assert len(failure.value.message) < 1100
    store.close()
    line.ended()


QUESTIONS = [
    {},
    {"do": None},
    {"do": "nothing"},
    {"do": "open"},
    {"do": "open", "path": 7},
    {"do": "open", "path": "a\0b"},
    {"do": "read", "part": 0, "at": 0, "size": 1},
    {"do": "write", "part": 0, "piece": 0, "size": 1},
    {"do": "verify"},
    {"do": "publish"},
    {"do": "join", "path": "/nowhere/x", "token": "x"},
    {"do": "begin", "path": "/nowhere/a/b"},
]


@pytest.mark.parametrize("question", QUESTIONS, ids=json.dumps)
def test_questions_without_sense_are_answered_and_end_nothing(question):
    line = Line()
    store = SshStore(line)
    with pytest.raises(GpuckptError):
        store.question(question)
    store.keep_alive()
    store.close()
    line.ended()


@pytest.mark.parametrize(
    "piece",
    [(99, 0, 1), (-1, 0, 1), (0, 99, 1), (0, -1, 1), (0, 0, PIECE_BYTES + 1), (0, 0, -1), (0, 1 << 59, 1), ("0", 0, 1)],
    ids=str,
)
def test_pieces_outside_of_the_image(image, tmp_path, piece):
    tmp_path.chmod(0o700)
    line = Line()
    store = SshStore(line)
    names = dict(zip(("part", "piece", "size"), piece, strict=True))
    places = {"part": piece[0], "at": piece[1] * PIECE_BYTES, "size": piece[2]}
    store.question({"do": "open", "path": str(image)}, most=1 << 20)
    with pytest.raises((GpuckptError, LinkLost)):
        store.question({"do": "read", **places}, most=PIECE_BYTES)
    store.leave()
    begun = store.question({"do": "begin", "path": str(tmp_path / "one")}, (image / manifests.NAME).read_bytes()).header
    store.question({"do": "join", "path": begun["place"], "token": begun["token"]})
    content = bytes(max(0, min(piece[2], 8)))
    with pytest.raises((GpuckptError, LinkLost)):
        store.question({"do": "write", **names}, content)
    store.close()
    line.ended()


def test_a_writer_needs_the_token(image, tmp_path):
    tmp_path.chmod(0o700)
    line = Line()
    store = SshStore(line)
    store.question({"do": "begin", "path": str(tmp_path / "one")}, (image / manifests.NAME).read_bytes())
    with pytest.raises(GpuckptError, match="another transfer"):
        store.question({"do": "join", "path": str(tmp_path / "one"), "token": "0" * 32})
    store.close()
    line.ended()


def test_a_pack_that_is_shared_with_a_published_image_is_never_written_to(image, tmp_path):
    tmp_path.chmod(0o700)
    published = make_image(tmp_path / "old", 5, seed=7, packs=1)
    coming = make_image(tmp_path / "source", 1, seed=8, packs=1, base=published)
    pack = next((published / "packs").glob("*.zst"))
    before = pack.read_bytes()
    raw = (coming / manifests.NAME).read_bytes()
    shared = [part.path for part in manifests.decode(raw, "x").parts].index(f"packs/{pack.name}")
    line = Line()
    store = SshStore(line)
    begun = store.question({"do": "begin", "path": str(tmp_path / "new")}, raw).header
    assert str(shared) in begun["held"]
    store.question({"do": "join", "path": begun["place"], "token": begun["token"]})
    content = bytes(8)
    piece = {"part": shared, "piece": 0, "size": 8}
    with pytest.raises(GpuckptError, match="shared with another image"):
        store.question({"do": "write", **piece}, content)
    store.close()
    line.ended()
    assert pack.read_bytes() == before
